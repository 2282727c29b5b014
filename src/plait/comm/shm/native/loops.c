// The inner loops, compiled for each kind of processor from one source.
//
// [Note: one source for all instruction sets] loops_target.h holds plain C that compilers vectorise; it is included
// once per instruction set, with that set enabled in the compiler. Function multi-versioning (target_clones)
// would be simpler, but needs ifunc, which musl and the sanitizers do not have. The bits are the same in
// every version because each item's arithmetic is: no contraction to fused multiply-add (the build passes
// -ffp-contract=off), no reordering, and half precision converted with integers rather than by instructions.
#include "loops.h"

#include <stdint.h>
#include <string.h>

#define PASTE_(a, b, c) a##_##b##_##c
#define PASTE(a, b, c) PASTE_(a, b, c)

#define TARGET plain
#include "loops_target.h"
#undef TARGET

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif
#define TARGET avx2
#include "loops_target.h"
#undef TARGET
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#endif
#define TARGET avx512
#include "loops_target.h"
#undef TARGET
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif

const struct pl_loops *const *pl_loops_of_level(int level) {
    switch (level) {
        case 0:
            return loops_of_plain;
#if defined(__x86_64__)
        case 1:
            return __builtin_cpu_supports("avx2") ? loops_of_avx2 : NULL;
        case 2:
            return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
                       ? loops_of_avx512
                       : NULL;
#endif
    }
    return NULL;
}
