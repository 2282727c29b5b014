// Reductions go block by block: a block's inputs are reduced into a buffer that stays in the first-level cache,
// finished there, and copied to the outputs. So the outputs may be inputs, the loops are few, and one loop
// for all dtypes does the non-temporal stores.
#include "kernels.h"

#include "loops.h"

#include <assert.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#define BLOCK_ITEMS 1024                // 512 and 2048 are up to a fifth slower, 4096 a third
#define STREAM_FROM ((size_t)1 << 20)  // bytes of an output, see [Note: non-temporal stores]
#define LINE 64                        // bytes of a cache line

static const size_t item_sizes[PL_NUM_DTYPES] = {8, 4, 2, 2, 8, 4, 2, 1, 1};

size_t pl_itemsize(int dtype) {
    assert(0 <= dtype && dtype < PL_NUM_DTYPES && "a dtype of pl_dtype");
    return item_sizes[dtype];
}

static const struct pl_loops *loops_of(int dtype) {
    const struct pl_loops *const *loops = NULL;
    for (int level = PL_NUM_LEVELS - 1; !loops; level--) loops = pl_loops_of_level(level);
    return loops[dtype];
}

static int is_half(int dtype) { return dtype == PL_BF16 || dtype == PL_F16; }

// [Note: non-temporal stores] A plain store first reads its line from memory. A non-temporal one does not, and
// leaves the caches to others: an output that is not read soon is written 1.5 times as fast, at any size. But an
// output that was still in a cache, or is read at once, is up to twice as fast with plain stores, the usual
// case for small ones: so the threshold is about the size of a core's own cache. Full lines must be written, so an array is
// streamed only from the first line's boundary on; sfence orders such stores before the flag that another
// rank waits for. (Measured on 2 cores that share 32 MiB, both at once: 35 against 22 GB/s for 1 to 128 MiB unread,
// 9 against 10 for 512 KiB and 8.7 against 7.3 for 1 MiB read back.)

static size_t bytes_to_boundary(const void *address) { return -(uintptr_t)address % LINE; }

// dst is aligned to a cache line.
static void stream_lines(char *dst, const char *src, size_t num_bytes) {
    size_t i = 0;
#if defined(__x86_64__)
    for (; i + LINE <= num_bytes; i += LINE) {
        const __m128i *from = (const __m128i *)(src + i);
        __m128i *to = (__m128i *)(dst + i);
        __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
        __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
        _mm_stream_si128(to, a);
        _mm_stream_si128(to + 1, b);
        _mm_stream_si128(to + 2, c);
        _mm_stream_si128(to + 3, d);
    }
#endif
    memcpy(dst + i, src + i, num_bytes - i);
}

static void end_streams(void) {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

void pl_copy(void *dst, const void *src, size_t num_bytes) {
    if (num_bytes < STREAM_FROM) {
        if (num_bytes) memcpy(dst, src, num_bytes);
        return;
    }
    size_t head = bytes_to_boundary(dst);
    memcpy(dst, src, head);
    stream_lines((char *)dst + head, (const char *)src + head, num_bytes - head);
    end_streams();
}

// The arguments of a pl_reduce, shared by its blocks.
struct reduction {
    const struct pl_loops *in, *out;
    size_t in_size, out_size;
    int op, num_ins, num_outs, add;
    const void *const *ins;
    void *const *outs;
    double scale;
    double *lanes;      // of the squares, or NULL
    size_t head;        // items of a first, short block, after which outs[0] is on a line's boundary
    uint64_t streamed;  // bit d: outs[d] is written with non-temporal stores. Outputs beyond 64 are not
};

static int is_read(const struct reduction *r, const void *out) {
    int aliases = r->add && out == r->outs[0];
    for (int s = 0; s < r->num_ins; s++) aliases |= out == r->ins[s];
    return aliases;
}

static uint64_t choose_streams(const struct reduction *r, size_t n) {
    uint64_t streamed = 0;
    if (n * r->out_size < STREAM_FROM) return 0;
    for (int d = 0; d < r->num_outs && d < 64; d++) {
        int in_step = bytes_to_boundary(r->outs[d]) == r->head * r->out_size;
        if (in_step && !is_read(r, r->outs[d])) streamed |= (uint64_t)1 << d;
    }
    return streamed;
}

static void reduce_ins(const struct reduction *r, void *acc, size_t start, size_t count) {
    size_t offset = start * r->in_size;
    const char *first = (const char *)r->ins[0] + offset;
    if (r->num_ins == 1)
        r->in->load(acc, first, count);
    else
        r->in->pair[r->op](acc, first, (const char *)r->ins[1] + offset, count);
    for (int s = 2; s < r->num_ins; s++) r->in->fold[r->op](acc, (const char *)r->ins[s] + offset, count);
}

static void reduce_block(const struct reduction *r, size_t start, size_t count) {
    _Alignas(LINE) double acc[BLOCK_ITEMS];
    _Alignas(LINE) uint16_t halves[BLOCK_ITEMS];
    const void *result = acc;
    size_t offset = start * r->out_size, num_bytes = count * r->out_size;
    reduce_ins(r, acc, start, count);
    if (r->scale != 1.0 && r->in->scale) r->in->scale(acc, r->scale, count);
    if (r->add) r->out->fold[PL_SUM](acc, (const char *)r->outs[0] + offset, count);
    if (r->out->round) {
        r->out->round(halves, acc, count);
        result = halves;
    }
    if (r->lanes) r->out->squares(r->lanes, start, result, count);
    for (int d = 0; d < r->num_outs; d++) {
        char *out = (char *)r->outs[d] + offset;
        if (d < 64 && r->streamed >> d & 1 && start >= r->head)
            stream_lines(out, result, num_bytes);
        else
            memcpy(out, result, num_bytes);
    }
}

void pl_reduce(int in_dtype, int out_dtype, int op, const void *const *ins, int num_ins, void *const *outs,
               int num_outs, size_t n, double scale, int add, double *squares) {
    double lanes[PL_LANES] = {0};
    struct reduction r = {.in_size = pl_itemsize(in_dtype), .out_size = pl_itemsize(out_dtype), .op = op,
                          .num_ins = num_ins, .num_outs = num_outs, .add = add, .ins = ins, .outs = outs,
                          .scale = scale, .lanes = squares ? lanes : NULL};
    assert((in_dtype == out_dtype || (in_dtype == PL_F32 && is_half(out_dtype)) ||
            (is_half(in_dtype) && out_dtype == PL_F32)) && "a pair of dtypes that the header names");
    assert(0 <= op && op < PL_NUM_OPS && num_ins >= 1 && num_outs >= 1 && "an operation on one input or more");
    r.in = loops_of(in_dtype);
    r.out = loops_of(out_dtype);
    r.head = bytes_to_boundary(outs[0]) / r.out_size;
    r.streamed = choose_streams(&r, n);
    if (!r.streamed) r.head = 0;
    for (size_t start = 0, count = r.head ? r.head : BLOCK_ITEMS; start < n; start += count, count = BLOCK_ITEMS)
        reduce_block(&r, start, count < n - start ? count : n - start);
    if (r.streamed) end_streams();
    if (!squares) return;
    double sum = 0;
    for (int lane = 0; lane < PL_LANES; lane++) sum += lanes[lane];
    *squares += sum;
}

void pl_squares(int dtype, const void *in, size_t n, double *squares) {
    double lanes[PL_LANES] = {0}, sum = 0;
    const struct pl_loops *loops = loops_of(dtype);
    size_t item = pl_itemsize(dtype);
    for (size_t start = 0; start < n; start += BLOCK_ITEMS) {
        size_t count = n - start < BLOCK_ITEMS ? n - start : BLOCK_ITEMS;
        loops->squares(lanes, start, (const char *)in + start * item, count);
    }
    for (int lane = 0; lane < PL_LANES; lane++) sum += lanes[lane];
    *squares += sum;
}
