// The table of inner loops: one entry per dtype, in a version per kind of processor.
#ifndef PLAIT_LOOPS_H
#define PLAIT_LOOPS_H

#include <stddef.h>

#define PL_NUM_DTYPES 9
#define PL_NUM_OPS 4
#define PL_LANES 16

// Loops over n items. `acc` holds items of the type in which a dtype is accumulated and overlaps no other argument.
struct pl_loops {
    void (*load)(void *acc, const void *a, size_t n);                               // acc = a
    void (*pair[PL_NUM_OPS])(void *acc, const void *a, const void *b, size_t n);    // acc = a op b
    void (*fold[PL_NUM_OPS])(void *acc, const void *a, size_t n);                   // acc = acc op a
    void (*scale)(void *acc, double scale, size_t n);                               // acc = acc * scale; NULL: integers
    void (*round)(void *out, const void *acc, size_t n);                            // NULL: same type as acc
    void (*squares)(double *lanes, size_t first, const void *values, size_t n);     // see squares() in loops_dtype.h
};

// One set of loops per kind of processor: level 0 runs everywhere, higher ones are faster.
#define PL_NUM_LEVELS 3

// The loops of a level, by pl_dtype; NULL if this processor cannot run them.
const struct pl_loops *const *pl_loops_of_level(int level);

#endif
