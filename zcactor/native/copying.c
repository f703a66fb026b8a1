/* Copies of many bytes. A plain copy reads the lines of the destination before it writes them, and fills the caches with
 * what is read much later, if at all. Non-temporal stores go past the caches: Intel 64 and IA-32 Architectures
 * Optimization Reference Manual, "Streaming Store". */
#include "hot.h"

#if defined(__x86_64__)
#include <emmintrin.h>

#define LINE ((size_t)64)

static void copy_past_caches(char *to, const char *from, size_t nbytes) {
    size_t head = -(uintptr_t)to % LINE; /* the stores need an aligned address; a line that is written in part is read */
    if (head > nbytes) head = nbytes;
    memcpy(to, from, head);
    to += head, from += head, nbytes -= head;
    for (; nbytes >= LINE; to += LINE, from += LINE, nbytes -= LINE) {
        const __m128i *in = (const __m128i *)from;
        __m128i *out = (__m128i *)to;
        const __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1), c = _mm_loadu_si128(in + 2),
                      d = _mm_loadu_si128(in + 3);
        _mm_stream_si128(out, a);
        _mm_stream_si128(out + 1, b);
        _mm_stream_si128(out + 2, c);
        _mm_stream_si128(out + 3, d);
    }
    _mm_sfence(); /* before anybody is told that the bytes are there */
    memcpy(to, from, nbytes);
}
#else
static void copy_past_caches(char *to, const char *from, size_t nbytes) { memcpy(to, from, nbytes); }
#endif

/* copy(to, source, nbytes): see COPY_DOC. */
PyObject *hot_copy(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long to, source;
    Py_ssize_t nbytes;
    if (!PyArg_ParseTuple(args, "KKn:copy", &to, &source, &nbytes)) return NULL;
    if (nbytes < 0) return PyErr_Format(PyExc_ValueError, "%zd bytes cannot be copied", nbytes);
    Py_BEGIN_ALLOW_THREADS
    copy_past_caches((char *)(uintptr_t)to, (const char *)(uintptr_t)source, (size_t)nbytes);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}
