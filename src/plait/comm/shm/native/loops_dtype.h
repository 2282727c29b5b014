// The loops of one dtype: ITEM is the type in memory, ACC that of the accumulation, WIDEN converts to ACC and
// NARROW back, where they differ. Included by loops_target.h once per dtype.

// Of two equal values the later one, as in x86's instruction; `now != now` keeps a NaN.
#define LARGER(now, next) ((now) > (next) || (now) != (now) ? (now) : (next))
#define SMALLER(now, next) ((now) < (next) || (now) != (now) ? (now) : (next))

#define LOOP(name, result)                                                                                        \
    static void NAMED(name)(void *acc_, const void *a_, size_t n) {                                               \
        ACC *restrict acc = acc_;                                                                                 \
        const ITEM *a = a_;                                                                                       \
        for (size_t i = 0; i < n; i++) acc[i] = (result);                                                         \
    }
#define PAIR_LOOP(name, result)                                                                                   \
    static void NAMED(name)(void *acc_, const void *a_, const void *b_, size_t n) {                               \
        ACC *restrict acc = acc_;                                                                                 \
        const ITEM *a = a_, *b = b_;                                                                              \
        for (size_t i = 0; i < n; i++) acc[i] = (result);                                                         \
    }

LOOP(load, WIDEN(a[i]))
LOOP(fold_sum, ADD(acc[i], WIDEN(a[i])))
LOOP(fold_prod, MULTIPLY(acc[i], WIDEN(a[i])))
LOOP(fold_max, LARGER(acc[i], WIDEN(a[i])))
LOOP(fold_min, SMALLER(acc[i], WIDEN(a[i])))
PAIR_LOOP(pair_sum, ADD(WIDEN(a[i]), WIDEN(b[i])))
PAIR_LOOP(pair_prod, MULTIPLY(WIDEN(a[i]), WIDEN(b[i])))
PAIR_LOOP(pair_max, LARGER(WIDEN(a[i]), WIDEN(b[i])))
PAIR_LOOP(pair_min, SMALLER(WIDEN(a[i]), WIDEN(b[i])))

#if IS_FLOAT
static void NAMED(scale)(void *acc_, double scale, size_t n) {
    ACC *acc = acc_, factor = (ACC)scale;
    for (size_t i = 0; i < n; i++) acc[i] *= factor;
}
#endif

#ifdef NARROW
static void NAMED(round)(void *out_, const void *acc_, size_t n) {
    ITEM *restrict out = out_;
    const ACC *acc = acc_;
    for (size_t i = 0; i < n; i++) out[i] = NARROW(acc[i]);
}
#endif

// Item k of the full array adds its square to lane k % PL_LANES; `values` are items first, first + 1, ...
static void NAMED(squares)(double *sums, size_t first, const void *values_, size_t n) {
    const ITEM *values = values_;
    double lanes[PL_LANES];
    size_t i = 0;
    for (; i < n && (first + i) % PL_LANES; i++) {
        double value = (double)WIDEN(values[i]);
        sums[(first + i) % PL_LANES] += value * value;
    }
    memcpy(lanes, sums, sizeof lanes);
    for (; i + PL_LANES <= n; i += PL_LANES) {
        for (size_t lane = 0; lane < PL_LANES; lane++) {
            double value = (double)WIDEN(values[i + lane]);
            lanes[lane] += value * value;
        }
    }
    memcpy(sums, lanes, sizeof lanes);
    for (; i < n; i++) {
        double value = (double)WIDEN(values[i]);
        sums[(first + i) % PL_LANES] += value * value;
    }
}

static const struct pl_loops NAMED(loops) = {
    .load = NAMED(load),
    .pair = {NAMED(pair_sum), NAMED(pair_max), NAMED(pair_min), NAMED(pair_prod)},
    .fold = {NAMED(fold_sum), NAMED(fold_max), NAMED(fold_min), NAMED(fold_prod)},
#if IS_FLOAT
    .scale = NAMED(scale),
#endif
#ifdef NARROW
    .round = NAMED(round),
#endif
    .squares = NAMED(squares),
};

#undef LARGER
#undef SMALLER
#undef LOOP
#undef PAIR_LOOP
#undef ITEM_NAME
#undef ITEM
#undef ACC
#undef WIDEN
#undef NARROW
#undef ADD
#undef MULTIPLY
#undef IS_FLOAT
