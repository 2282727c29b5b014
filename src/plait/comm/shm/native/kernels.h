// Sums, products, maxima, minima and copies of arrays, for the host transport's shared memory.
#ifndef PLAIT_KERNELS_H
#define PLAIT_KERNELS_H

#include <stddef.h>

typedef enum { PL_F64, PL_F32, PL_BF16, PL_F16, PL_I64, PL_I32, PL_I16, PL_I8, PL_U8 } pl_dtype;
typedef enum { PL_SUM, PL_MAX, PL_MIN, PL_PROD } pl_op;

// Bytes of an item of `dtype`.
size_t pl_itemsize(int dtype);

// For every i < n and every d:
//     outs[d][i] = (add ? outs[0][i] : 0) + scale * (ins[0][i] op ins[1][i] op ins[2][i] ...)
//
// in_dtype equals out_dtype, or one is PL_F32 and the other PL_BF16 or PL_F16.
// The reduction runs strictly in the order of `ins`: f32, bf16 and f16 in f32, f64 in f64, integers in their own
// width, where sums and products wrap around. A maximum or minimum with a NaN is a NaN; of two equal values it
// is the later one (also for zeros of both signs).
// scale is for floats: 1.0 leaves the values alone, any other is rounded to the type of the accumulation and
// multiplied there. Results are rounded once, to nearest even; a NaN stays a NaN (its payload is unspecified), and
// values too large for f16 become infinite.
// squares, if not NULL, grows by the sum in double of the squares of the values written, as they are rounded; the
// order of that sum depends on n alone.
// An out may be an in, or another out; other overlaps are not allowed. Pointers are aligned to their items.
// The same arguments give the same bits on every processor, at every alignment.
void pl_reduce(int in_dtype, int out_dtype, int op, const void *const *ins, int num_ins, void *const *outs,
               int num_outs, size_t n, double scale, int add, double *squares);

// Adds to *squares the sum in double of the squares of n floats, in an order that depends on n alone.
void pl_squares(int dtype, const void *in, size_t n, double *squares);

// Copies between memories that do not overlap.
void pl_copy(void *dst, const void *src, size_t num_bytes);

#endif
