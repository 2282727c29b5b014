// The loops of every dtype for one instruction set, TARGET. Included by loops.c once per set.

#define NAMED(name) PASTE(name, ITEM_NAME, TARGET)
#define HELPER(name) PASTE(name, of, TARGET)

// A float's bits and back; compilers remove the copies.
static inline uint32_t HELPER(bits)(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float HELPER(value)(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float HELPER(widen_bf16)(uint16_t half) { return HELPER(value)((uint32_t)half << 16); }

static inline uint16_t HELPER(narrow_bf16)(float wide) {
    uint32_t bits = HELPER(bits)(wide);
    uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    uint32_t quiet = bits | 0x400000u;  // rounding could turn a NaN into an infinity
    return (uint16_t)(((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded) >> 16);
}

// Half precision after F. Giesen, "Half to float done quick" and "float->half variants". The float arithmetic used
// is exact and free of denormals, so the result does not depend on the thread's denormal mode.
static inline float HELPER(widen_f16)(uint16_t half) {
    uint32_t shifted = (uint32_t)(half & 0x7fffu) << 13;
    uint32_t exponent = shifted & 0x0f800000u;
    uint32_t normal = shifted + ((127u - 15u) << 23);
    uint32_t special = shifted + ((255u - 31u) << 23);  // infinity and NaN
    uint32_t tiny = HELPER(bits)(HELPER(value)(normal + (1u << 23)) - HELPER(value)(113u << 23));
    uint32_t magnitude = exponent == 0x0f800000u ? special : exponent == 0 ? tiny : normal;
    return HELPER(value)(magnitude | (uint32_t)(half & 0x8000u) << 16);
}

static inline uint16_t HELPER(narrow_f16)(float wide) {
    uint32_t bits = HELPER(bits)(wide);
    uint32_t magnitude = bits & 0x7fffffffu;
    // Half's denormals are the multiples of 2^-24, which is the spacing of floats from 0.5 on.
    uint32_t tiny = HELPER(bits)(HELPER(value)(magnitude) + 0.5f) - HELPER(bits)(0.5f);
    uint32_t normal = (magnitude - ((127u - 15u) << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    uint32_t half = magnitude >= (143u << 23) ? special : magnitude < (113u << 23) ? tiny : normal;
    return (uint16_t)(half | (bits >> 16 & 0x8000u));
}

#define SAME(x) (x)
#define FLOAT_ADD(a, b) ((a) + (b))
#define FLOAT_MULTIPLY(a, b) ((a) * (b))

#define ITEM_NAME f64
#define ITEM double
#define ACC double
#define WIDEN SAME
#define ADD FLOAT_ADD
#define MULTIPLY FLOAT_MULTIPLY
#define IS_FLOAT 1
#include "loops_dtype.h"

#define ITEM_NAME f32
#define ITEM float
#define ACC float
#define WIDEN SAME
#define ADD FLOAT_ADD
#define MULTIPLY FLOAT_MULTIPLY
#define IS_FLOAT 1
#include "loops_dtype.h"

#define ITEM_NAME bf16
#define ITEM uint16_t
#define ACC float
#define WIDEN HELPER(widen_bf16)
#define NARROW HELPER(narrow_bf16)
#define ADD FLOAT_ADD
#define MULTIPLY FLOAT_MULTIPLY
#define IS_FLOAT 1
#include "loops_dtype.h"

#define ITEM_NAME f16
#define ITEM uint16_t
#define ACC float
#define WIDEN HELPER(widen_f16)
#define NARROW HELPER(narrow_f16)
#define ADD FLOAT_ADD
#define MULTIPLY FLOAT_MULTIPLY
#define IS_FLOAT 1
#include "loops_dtype.h"

// Integers are added and multiplied as unsigned, which wraps around; narrow ones as 32 bits, because a product of
// two uint16_t is an int, which may overflow.
#define ITEM_NAME i64
#define ITEM int64_t
#define ACC int64_t
#define WIDEN SAME
#define ADD(a, b) (int64_t)((uint64_t)(a) + (uint64_t)(b))
#define MULTIPLY(a, b) (int64_t)((uint64_t)(a) * (uint64_t)(b))
#define IS_FLOAT 0
#include "loops_dtype.h"

#define ITEM_NAME i32
#define ITEM int32_t
#define ACC int32_t
#define WIDEN SAME
#define ADD(a, b) (int32_t)((uint32_t)(a) + (uint32_t)(b))
#define MULTIPLY(a, b) (int32_t)((uint32_t)(a) * (uint32_t)(b))
#define IS_FLOAT 0
#include "loops_dtype.h"

#define ITEM_NAME i16
#define ITEM int16_t
#define ACC int16_t
#define WIDEN SAME
#define ADD(a, b) (int16_t)((uint16_t)(a) + (uint16_t)(b))
#define MULTIPLY(a, b) (int16_t)((uint32_t)(a) * (uint32_t)(b))
#define IS_FLOAT 0
#include "loops_dtype.h"

#define ITEM_NAME i8
#define ITEM int8_t
#define ACC int8_t
#define WIDEN SAME
#define ADD(a, b) (int8_t)((uint8_t)(a) + (uint8_t)(b))
#define MULTIPLY(a, b) (int8_t)((uint32_t)(a) * (uint32_t)(b))
#define IS_FLOAT 0
#include "loops_dtype.h"

#define ITEM_NAME u8
#define ITEM uint8_t
#define ACC uint8_t
#define WIDEN SAME
#define ADD(a, b) (uint8_t)((a) + (b))
#define MULTIPLY(a, b) (uint8_t)((uint32_t)(a) * (uint32_t)(b))
#define IS_FLOAT 0
#include "loops_dtype.h"

#define ENTRY(dtype) &PASTE(loops, dtype, TARGET)
// In the order of pl_dtype.
static const struct pl_loops *const PASTE(loops, of, TARGET)[PL_NUM_DTYPES] = {
    ENTRY(f64), ENTRY(f32), ENTRY(bf16), ENTRY(f16), ENTRY(i64), ENTRY(i32), ENTRY(i16), ENTRY(i8), ENTRY(u8),
};

#undef ENTRY
#undef SAME
#undef FLOAT_ADD
#undef FLOAT_MULTIPLY
#undef NAMED
#undef HELPER
