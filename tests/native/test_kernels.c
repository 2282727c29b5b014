// The kernels: every processor's loops give the bits of the plain ones, and threads reduce into shared arrays.
#include "check.h"
#include "kernels.h"
#include "loops.h"

#include <pthread.h>
#include <stdint.h>
#include <string.h>

#define MOST_ITEMS ((size_t)600)

static uint64_t random_state = 1;

static uint64_t random_bits(void) {  // Vigna's xorshift64*
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return random_state * 2685821657736338717u;
}

// Every bit pattern is as likely: many NaNs, infinities and denormals of the 16-bit types, all exponents of others.
// One item in eight keeps its leading bits only, which makes zeros, infinities and ties of roundings.
static void fill(void *items, size_t size, size_t n) {
    for (size_t i = 0; i < n; i++) {
        uint64_t bits = random_bits();
        if (random_bits() % 8 == 0) bits &= ~(uint64_t)0 << random_bits() % (size * 8);
        memcpy((char *)items + i * size, &bits, size);
    }
}

static int is_nan(int dtype, const void *item) {
    static const uint64_t infinities[] = {0x7ff0u, 0x7f80u, 0x7f80u, 0x7c00u};  // their leading 16 bits
    uint64_t bits = 0;
    if (dtype > PL_F16) return 0;
    size_t size = pl_itemsize(dtype);
    memcpy(&bits, item, size);
    uint64_t infinity = infinities[dtype] << (size * 8 - 16);
    return (bits & ~((uint64_t)1 << (size * 8 - 1))) > infinity;
}

static void check_same(int dtype, const void *a, const void *b, size_t n, const char *what) {
    size_t size = pl_itemsize(dtype);
    for (size_t i = 0; i < n; i++) {
        const char *x = (const char *)a + i * size, *y = (const char *)b + i * size;
        int same = memcmp(x, y, size) == 0 || (is_nan(dtype, x) && is_nan(dtype, y));
        CHECK(same, "%s of dtype %d differs at item %zu of %zu", what, dtype, i, n);
    }
}

// Runs every loop of `wide` and of `plain` on the same n random items, off any alignment but the item's.
static void compare_loops(const struct pl_loops *wide, const struct pl_loops *plain, int dtype, size_t n) {
    static double a_[MOST_ITEMS + 1], b_[MOST_ITEMS + 1], now_[MOST_ITEMS], x[MOST_ITEMS], y[MOST_ITEMS];
    size_t size = pl_itemsize(dtype);
    int acc_dtype = dtype == PL_BF16 || dtype == PL_F16 ? PL_F32 : dtype;
    char *a = (char *)a_ + size, *b = (char *)b_ + size;
    fill(a, size, n);
    fill(b, size, n);
    fill(now_, pl_itemsize(acc_dtype), n);
    wide->load(x, a, n), plain->load(y, a, n);
    check_same(acc_dtype, x, y, n, "load");
    for (int op = 0; op < PL_NUM_OPS; op++) {
        wide->pair[op](x, a, b, n), plain->pair[op](y, a, b, n);
        check_same(acc_dtype, x, y, n, "pair");
        memcpy(x, now_, sizeof now_), memcpy(y, now_, sizeof now_);
        wide->fold[op](x, a, n), plain->fold[op](y, a, n);
        check_same(acc_dtype, x, y, n, "fold");
    }
    if (wide->scale) {
        memcpy(x, now_, sizeof now_), memcpy(y, now_, sizeof now_);
        wide->scale(x, 1.0 / 3, n), plain->scale(y, 1.0 / 3, n);
        check_same(acc_dtype, x, y, n, "scale");
    }
    if (wide->round) {
        wide->round(x, now_, n), plain->round(y, now_, n);
        check_same(dtype, x, y, n, "round");
    }
    double sums[PL_LANES] = {0}, others[PL_LANES] = {0};
    wide->squares(sums, n % 5, a, n), plain->squares(others, n % 5, a, n);
    check_same(PL_F64, sums, others, PL_LANES, "squares");
}

static void compare_level(int level) {
    const struct pl_loops *const *plain = pl_loops_of_level(0), *const *wide = pl_loops_of_level(level);
    for (int dtype = 0; wide && dtype < PL_NUM_DTYPES; dtype++) {
        for (size_t n = 0; n <= 70; n++) compare_loops(wide[dtype], plain[dtype], dtype, n);
        for (size_t round = 0; round < 50; round++)
            compare_loops(wide[dtype], plain[dtype], dtype, MOST_ITEMS - round % 40);
    }
}

// Two threads, each of which reduces its half of two shared arrays, in place or into two others, and copies it.
enum { NUM_THREADS = 2, HALF = 300007 };
static float *arrays[5];

struct half {
    size_t start;
    int in_place;
    double squares;
    pthread_t thread;
};

static void *reduce_half(void *half_) {
    struct half *half = half_;
    float *const *outs_of = half->in_place ? arrays : arrays + 2;
    const void *ins[] = {arrays[0] + half->start, arrays[1] + half->start};
    void *outs[] = {outs_of[0] + half->start, outs_of[1] + half->start};
    pl_reduce(PL_F32, PL_F32, PL_SUM, ins, 2, outs, 2, HALF, 0.5, 0, &half->squares);
    pl_copy(arrays[4] + half->start, outs[1], HALF * sizeof(float));
    return NULL;
}

static void check_threads(int in_place) {
    struct half halves[NUM_THREADS];
    double squares = 0, found = 0;
    for (size_t i = 0; i < NUM_THREADS * HALF; i++) arrays[0][i] = (float)(i % 1000), arrays[1][i] = (float)(i % 7);
    for (int t = 0; t < NUM_THREADS; t++) {
        halves[t] = (struct half){.start = (size_t)t * HALF, .in_place = in_place};
        int failed = pthread_create(&halves[t].thread, NULL, reduce_half, &halves[t]);
        CHECK(!failed, "pthread_create: %d", failed);
    }
    for (int t = 0; t < NUM_THREADS; t++) pthread_join(halves[t].thread, NULL), found += halves[t].squares;
    for (size_t i = 0; i < NUM_THREADS * HALF; i++) {
        float expected = (float)(i % 1000 + i % 7) / 2;
        float *const *outs = in_place ? arrays : arrays + 2;
        CHECK(outs[0][i] == expected && outs[1][i] == expected && arrays[4][i] == expected, "item %zu", i);
        squares += (double)expected * expected;
    }
    CHECK(found == squares, "squares: %f, expected %f", found, squares);  // both exact
}

void test_kernels(void) {
    for (int level = 1; level < PL_NUM_LEVELS; level++) compare_level(level);
    for (int i = 0; i < 5; i++) {
        arrays[i] = calloc(NUM_THREADS * HALF, sizeof(float));
        CHECK(arrays[i], "out of memory");
    }
    check_threads(0);
    check_threads(1);
    for (int i = 0; i < 5; i++) free(arrays[i]);
}
