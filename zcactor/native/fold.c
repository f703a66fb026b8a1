/* The sum of arrays element by element, in the order of the inputs: ((in[0] + in[1]) + in[2]) + ...

   The bits depend on that order alone, and zcactor/collectives/folding.py has a twin in NumPy with the same ones.
   Narrow floats are added as floats of 32 bits and rounded once. Integers wrap. The interpreter lock is released. */
#include "hot.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3") /* the loops are worth vectors */
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define BLOCK_NBYTES (256 << 10) /* of the result: it stays in the second-level cache while inputs are added to it */
#define NARROW 4096              /* elements of a block of narrow floats, whose sum lies on the stack */
#define MAX_INPUTS 4096
#define FEW_INPUTS 16 /* so many addresses are kept on the stack */

typedef struct {
    const char *const *inputs;
    size_t ninputs;
    char *out;
    size_t count; /* elements */
    long divisor; /* of a mean; 0: a sum */
    int streams;  /* whether the result is written past the cache */
} Job;

/* A large result is written past the cache. Otherwise each line of it is read from memory before it is written, and
   drives out lines of the inputs: four inputs of 16 MiB take 3.7 ms then, and 3.3 ms past the cache. The sum is made on
   the stack first, piece by piece: compilers write nothing past the cache by themselves. */
#define STREAMED_NBYTES (8 << 20)
#define PIECE_NBYTES 4096
#if defined(__x86_64__)
#define STREAMS(address) (!((uintptr_t)(address) % sizeof(__m128i)))
static inline void stream_out(char *to, const char *from, size_t n) {
    size_t i = 0;
    for (; i + sizeof(__m128i) <= n; i += sizeof(__m128i))
        _mm_stream_si128((__m128i *)(to + i), _mm_load_si128((const __m128i *)(from + i)));
    memcpy(to + i, from + i, n - i);
}
static inline void stream_end(void) { _mm_sfence(); } /* before others read the result */
#else
#define STREAMS(address) 0
static inline void stream_out(char *to, const char *from, size_t n) { memcpy(to, from, n); }
static inline void stream_end(void) {}
#endif

/* Vectors of 256 bits sum 1 MiB from the third-level cache in 31 us, and those of 128 bits in 36. */
#if defined(__x86_64__)
#define AVX2 __attribute__((target("avx2")))
#define CHOOSE(NAME)                                                              \
    AVX2 static void fold_##NAME##_by_256(const Job *job) { add_##NAME(job); } \
    static void fold_##NAME(const Job *job) {                                  \
        if (__builtin_cpu_supports("avx2")) fold_##NAME##_by_256(job);         \
        else add_##NAME(job);                                                  \
    }
#else
#define CHOOSE(NAME) \
    static void fold_##NAME(const Job *job) { add_##NAME(job); }
#endif
#define WIDE(NAME, T, DIVIDE)                                                                 \
    static inline __attribute__((always_inline)) void add_##NAME(const Job *job) {             \
        T piece[PIECE_NBYTES / sizeof(T)] __attribute__((aligned(64)));                        \
        const size_t step = (job->streams ? PIECE_NBYTES : BLOCK_NBYTES) / sizeof(T);          \
        for (size_t start = 0; start < job->count; start += step) {                            \
            const size_t n = job->count - start < step ? job->count - start : step;            \
            T *restrict out = job->streams ? piece : (T *)job->out + start;                    \
            const char *const *in = job->inputs;                                               \
            const T *restrict a = (const T *)in[0] + start;                                    \
            size_t k = 1;                                                                      \
            if (job->ninputs == 1) {                                                           \
                memcpy(out, a, n * sizeof(T));                                                 \
            } else if (job->ninputs == 2) {                                                    \
                const T *restrict b = (const T *)in[1] + start;                                \
                for (size_t i = 0; i < n; i++) out[i] = (T)(a[i] + b[i]);                      \
                k = 2;                                                                         \
            } else if (job->ninputs == 3) {                                                    \
                const T *restrict b = (const T *)in[1] + start, *restrict c = (const T *)in[2] + start; \
                for (size_t i = 0; i < n; i++) out[i] = (T)((T)(a[i] + b[i]) + c[i]);          \
                k = 3;                                                                         \
            } else {                                                                           \
                const T *restrict b = (const T *)in[1] + start, *restrict c = (const T *)in[2] + start, \
                        *restrict d = (const T *)in[3] + start;                                \
                for (size_t i = 0; i < n; i++) out[i] = (T)((T)((T)(a[i] + b[i]) + c[i]) + d[i]); \
                k = 4;                                                                         \
            }                                                                                  \
            for (; k + 1 < job->ninputs; k += 2) {                                             \
                const T *restrict c = (const T *)in[k] + start, *restrict d = (const T *)in[k + 1] + start; \
                for (size_t i = 0; i < n; i++) out[i] = (T)((T)(out[i] + c[i]) + d[i]);        \
            }                                                                                  \
            if (k < job->ninputs) {                                                            \
                const T *restrict c = (const T *)in[k] + start;                                \
                for (size_t i = 0; i < n; i++) out[i] = (T)(out[i] + c[i]);                    \
            }                                                                                  \
            DIVIDE                                                                             \
            if (job->streams) stream_out(job->out + start * sizeof(T), (const char *)piece, n * sizeof(T)); \
        }                                                                                      \
        if (job->streams) stream_end();                                                        \
    }                                                                                          \
    CHOOSE(NAME)
#define NOTHING
#define DIVIDED(T)                                                         \
    if (job->divisor) {                                                    \
        const T divisor = (T)job->divisor;                                 \
        for (size_t i = 0; i < n; i++) out[i] /= divisor;                  \
    }

WIDE(u8, uint8_t, NOTHING)
WIDE(u16, uint16_t, NOTHING)
WIDE(u32, uint32_t, NOTHING)
WIDE(u64, uint64_t, NOTHING)
WIDE(f32, float, DIVIDED(float))
WIDE(f64, double, DIVIDED(double))

/* ---- narrow floats */

static inline float bits_to_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
static inline uint32_t float_to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float from_bf16(uint16_t half) { return bits_to_float((uint32_t)half << 16); }
/* To the nearest, ties to even. */
static inline uint16_t to_bf16(float value) {
    const uint32_t bits = float_to_bits(value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const uint32_t nan = (bits >> 16 & 0x8000) | 0x7fc0;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}

#if defined(__aarch64__)
/* Each processor converts, with these roundings, and compilers make vectors of it; of the branches below they do not. */
static inline float from_f16(uint16_t half) {
    __fp16 value;
    memcpy(&value, &half, sizeof value);
    return value;
}
static inline uint16_t to_f16(float value) {
    const __fp16 rounded = (__fp16)value;
    uint16_t half;
    memcpy(&half, &rounded, sizeof half);
    return half;
}
#else
static inline float from_f16(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
    if (rest >= 0x7c00) return bits_to_float(sign | 0x7f800000 | (rest & 0x3ff) << 13 | (rest > 0x7c00 ? 0x400000 : 0));
    if (rest >= 0x400) return bits_to_float(sign | ((rest << 13) + 0x38000000));
    const float small = (float)rest * 0x1p-24f; /* exact */
    return sign ? -small : small;
}
/* To the nearest, ties to even. */
static inline uint16_t to_f16(float value) {
    const uint32_t bits = float_to_bits(value), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (rest >> 13 & 0x3ff));
    if (rest >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* rounds to more than the largest */
    if (rest >= 0x38800000) return (uint16_t)(sign | ((rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13));
    /* Adding 0.5 moves the last bit of a number below 2^-14 to the last bit of the sum, which rounds. */
    const float moved = bits_to_float(rest) + 0.5f;
    return (uint16_t)(sign | (float_to_bits(moved) - 0x3f000000));
}
#endif

#define SCALAR_LOADS(NAME)                                                                        \
    static void NAME##_set(float *sum, const uint16_t *from, size_t n) {                          \
        for (size_t i = 0; i < n; i++) sum[i] = from_##NAME(from[i]);                             \
    }                                                                                             \
    static void NAME##_add(float *sum, const uint16_t *from, size_t n) {                          \
        for (size_t i = 0; i < n; i++) sum[i] = sum[i] + from_##NAME(from[i]);                    \
    }                                                                                             \
    static void NAME##_round(uint16_t *out, const float *sum, size_t n) {                         \
        for (size_t i = 0; i < n; i++) out[i] = to_##NAME(sum[i]);                                \
    }
SCALAR_LOADS(bf16)
SCALAR_LOADS(f16)

#if defined(__x86_64__)
#define F16C __attribute__((target("avx,f16c")))
F16C static void f16c_set(float *sum, const uint16_t *from, size_t n) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(sum + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
    f16_set(sum + i, from + i, n - i);
}
F16C static void f16c_add(float *sum, const uint16_t *from, size_t n) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m256 other = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i)));
        _mm256_storeu_ps(sum + i, _mm256_add_ps(_mm256_loadu_ps(sum + i), other));
    }
    f16_add(sum + i, from + i, n - i);
}
F16C static void f16c_round(uint16_t *out, const float *sum, size_t n) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(out + i), _mm256_cvtps_ph(_mm256_loadu_ps(sum + i), _MM_FROUND_TO_NEAREST_INT));
    f16_round(out + i, sum + i, n - i);
}
#endif

typedef struct {
    void (*set)(float *, const uint16_t *, size_t), (*add)(float *, const uint16_t *, size_t),
        (*round)(uint16_t *, const float *, size_t);
} Narrow;

static void fold_narrow(const Job *job, const Narrow *how) {
    float sum[NARROW];
    for (size_t start = 0; start < job->count; start += NARROW) {
        const size_t n = job->count - start < NARROW ? job->count - start : NARROW;
        how->set(sum, (const uint16_t *)job->inputs[0] + start, n);
        for (size_t k = 1; k < job->ninputs; k++) how->add(sum, (const uint16_t *)job->inputs[k] + start, n);
        if (job->divisor) {
            const float divisor = (float)job->divisor;
            for (size_t i = 0; i < n; i++) sum[i] /= divisor;
        }
        how->round((uint16_t *)job->out + start, sum, n);
    }
}
static void fold_bf16(const Job *job) {
    static const Narrow how = {bf16_set, bf16_add, bf16_round};
    fold_narrow(job, &how);
}
static void fold_f16(const Job *job) {
    static const Narrow how = {f16_set, f16_add, f16_round};
#if defined(__x86_64__)
    static const Narrow fast = {f16c_set, f16c_add, f16c_round};
    if (__builtin_cpu_supports("avx") && __builtin_cpu_supports("f16c")) {
        fold_narrow(job, &fast);
        return;
    }
#endif
    fold_narrow(job, &how);
}

/* ---- from Python */

static const struct {
    const char *name;
    void (*fold)(const Job *);
    size_t itemsize;
    int divides;
} kinds[] = {
    {"u8", fold_u8, 1, 0},   {"u16", fold_u16, 2, 0}, {"u32", fold_u32, 4, 0},   {"u64", fold_u64, 8, 0},
    {"f32", fold_f32, 4, 1}, {"f64", fold_f64, 8, 1}, {"bf16", fold_bf16, 2, 1}, {"f16", fold_f16, 2, 1},
};

/* The address of memory for `count` elements: given as a number, as bytes, or as an array that is contiguous. */
static int fold_address(PyObject *object, Py_ssize_t count, size_t itemsize, char **address) {
    Py_ssize_t nbytes = -1;
    if (PyBytes_Check(object)) {
        *address = PyBytes_AS_STRING(object);
        nbytes = PyBytes_GET_SIZE(object);
    } else if (PyArray_Check(object)) {
        PyArrayObject *array = (PyArrayObject *)object;
        *address = PyArray_BYTES(array);
        nbytes = PyArray_IS_C_CONTIGUOUS(array) ? PyArray_NBYTES(array) : 0;
    } else {
        *address = PyLong_AsVoidPtr(object);
        if (!*address && PyErr_Occurred()) return -1;
    }
    if (nbytes >= 0 && (size_t)nbytes / itemsize < (size_t)count) {
        PyErr_Format(PyExc_ValueError, "%zd bytes for %zd elements of %zu bytes", nbytes, count, itemsize);
        return -1;
    }
    if ((uintptr_t)*address % itemsize == 0) return 0;
    PyErr_Format(PyExc_ValueError, "address %p is not a multiple of %zu bytes", (void *)*address, itemsize);
    return -1;
}

/* Sum the inputs of a tuple into `to`: 0, or -1 with an exception. */
static int fold_into(const char *kind, PyObject *addresses, PyObject *to, Py_ssize_t count, long divisor) {
    Job job = {0};
    job.divisor = divisor;
    size_t which = 0;
    while (which < Py_ARRAY_LENGTH(kinds) && strcmp(kind, kinds[which].name)) which++;
    if (which == Py_ARRAY_LENGTH(kinds)) {
        PyErr_Format(PyExc_ValueError, "no sums of %.20s are known", kind);
        return -1;
    }
    const Py_ssize_t n = PyTuple_GET_SIZE(addresses);
    if (n < 1 || n > MAX_INPUTS) {
        PyErr_Format(PyExc_ValueError, "%zd inputs; a sum has 1 to %d", n, MAX_INPUTS);
        return -1;
    }
    if (count < 0 || job.divisor < 0 || (job.divisor && !kinds[which].divides)) {
        PyErr_SetString(PyExc_ValueError, "a negative count, or a divisor that is negative or of integers");
        return -1;
    }
    char *few[FEW_INPUTS], **inputs = n > FEW_INPUTS ? PyMem_New(char *, n) : few;
    if (!inputs) {
        PyErr_NoMemory();
        return -1;
    }
    int wrong = fold_address(to, count, kinds[which].itemsize, &job.out) < 0;
    for (Py_ssize_t i = 0; !wrong && i < n; i++)
        wrong = fold_address(PyTuple_GET_ITEM(addresses, i), count, kinds[which].itemsize, &inputs[i]) < 0;
    if (!wrong) {
        job.inputs = (const char *const *)inputs;
        job.ninputs = (size_t)n;
        job.count = (size_t)count;
        job.streams = job.count * kinds[which].itemsize >= STREAMED_NBYTES && STREAMS(job.out);
        if (job.count * kinds[which].itemsize < BLOCK_NBYTES / 8) kinds[which].fold(&job); /* sooner than others get the lock */
        else {
            Py_BEGIN_ALLOW_THREADS
            kinds[which].fold(&job);
            Py_END_ALLOW_THREADS
        }
    }
    if (inputs != few) PyMem_Free(inputs);
    return wrong ? -1 : 0;
}
/* fold(kind, inputs, out, count, divisor): see FOLD_DOC. */
PyObject *hot_fold(PyObject *Py_UNUSED(module), PyObject *args) {
    const char *kind;
    PyObject *addresses, *to;
    Py_ssize_t count;
    long divisor;
    if (!PyArg_ParseTuple(args, "sO!Onl:fold", &kind, &PyTuple_Type, &addresses, &to, &count, &divisor)) return NULL;
    if (import_numpy() < 0 || fold_into(kind, addresses, to, count, divisor) < 0) return NULL;
    Py_RETURN_NONE;
}
/* folded(kind, inputs, like, divisor): see FOLDED_DOC. */
PyObject *hot_folded(PyObject *Py_UNUSED(module), PyObject *args) {
    const char *kind;
    PyObject *addresses, *like;
    long divisor;
    if (import_numpy() < 0) return NULL;
    if (!PyArg_ParseTuple(args, "sO!O!l:folded", &kind, &PyTuple_Type, &addresses, &PyArray_Type, &like, &divisor))
        return NULL;
    PyArrayObject *given = (PyArrayObject *)like;
    if (PyDataType_REFCHK(PyArray_DESCR(given))) { /* sums are no addresses of objects */
        PyErr_SetString(PyExc_ValueError, "a sum has elements that are numbers, and no Python objects");
        return NULL;
    }
    PyArray_Descr *dtype = (PyArray_Descr *)Py_NewRef(PyArray_DESCR(given));
    PyObject *result = PyArray_NewFromDescr(&PyArray_Type, dtype, PyArray_NDIM(given), PyArray_DIMS(given), NULL, NULL, 0,
                                            NULL);
    if (result && fold_into(kind, addresses, result, PyArray_SIZE(given), divisor) < 0) Py_CLEAR(result);
    if (result) PyArray_CLEARFLAGS((PyArrayObject *)result, NPY_ARRAY_WRITEABLE);
    return result;
}
