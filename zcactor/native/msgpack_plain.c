/* Plain values as MessagePack: None, booleans, integers of 64 bits, floats, text and bytes. */
#include "hot.h"

/* Return the bytes that `value` takes, or -1 when it is not plain (no exception is set). */
Py_ssize_t plain_size(PyObject *value) {
    PyTypeObject *type = Py_TYPE(value);
    if (type == &PyLong_Type || type == &PyFloat_Type) return 9;
    if (value == Py_None || type == &PyBool_Type) return 1;
    if (type == &PyUnicode_Type) {
        Py_ssize_t n;
        if (PyUnicode_IS_COMPACT_ASCII(value)) return PyUnicode_GET_LENGTH(value) + 5;
        if (!PyUnicode_AsUTF8AndSize(value, &n)) {
            PyErr_Clear();
            return -1;
        } /* a lone surrogate, which needs pickle */
        return n + 5;
    }
    if (type == &PyBytes_Type) return PyBytes_GET_SIZE(value) + 5;
    return -1;
}
char *put_sized(char *p, const char *from, Py_ssize_t n, int h8, int h16, int h32) {
    if (n < 256 && h8) p = put_big(p, (unsigned char)h8, (uint64_t)n, 1);
    else if (n < 65536) p = put_big(p, (unsigned char)h16, (uint64_t)n, 2);
    else p = put_big(p, (unsigned char)h32, (uint64_t)n, 4);
    memcpy(p, from, (size_t)n);
    return p + n;
}
/* Write a value that plain_size has accepted; NULL when an int does not fit 64 bits (no exception is set). */
char *put_plain(char *p, PyObject *value) {
    PyTypeObject *type = Py_TYPE(value);
    if (type == &PyLong_Type) {
        int overflow;
        long long v = PyLong_AsLongLongAndOverflow(value, &overflow);
        if (overflow > 0) {
            unsigned long long u = PyLong_AsUnsignedLongLong(value);
            if (u == (unsigned long long)-1 && PyErr_Occurred()) {
                PyErr_Clear();
                return NULL;
            }
            return put_big(p, 0xcf, u, 8);
        }
        if (overflow) return NULL;
        if (v >= 0) {
            if (v < 128) {
                *p++ = (char)v;
                return p;
            }
            if (v < 256) return put_big(p, 0xcc, (uint64_t)v, 1);
            if (v < 65536) return put_big(p, 0xcd, (uint64_t)v, 2);
            if (v <= UINT32_MAX) return put_big(p, 0xce, (uint64_t)v, 4);
            return put_big(p, 0xcf, (uint64_t)v, 8);
        }
        if (v >= -32) {
            *p++ = (char)v;
            return p;
        }
        if (v >= INT8_MIN) return put_big(p, 0xd0, (uint64_t)v, 1);
        if (v >= INT16_MIN) return put_big(p, 0xd1, (uint64_t)v, 2);
        if (v >= INT32_MIN) return put_big(p, 0xd2, (uint64_t)v, 4);
        return put_big(p, 0xd3, (uint64_t)v, 8);
    }
    if (type == &PyFloat_Type) {
        double d = PyFloat_AS_DOUBLE(value);
        uint64_t bits;
        memcpy(&bits, &d, 8);
        return put_big(p, 0xcb, bits, 8);
    }
    if (value == Py_None) {
        *p++ = (char)0xc0;
        return p;
    }
    if (type == &PyBool_Type) {
        *p++ = (char)(value == Py_True ? 0xc3 : 0xc2);
        return p;
    }
    if (type == &PyUnicode_Type) {
        Py_ssize_t n;
        const char *s = PyUnicode_AsUTF8AndSize(value, &n);
        if (!s) {
            PyErr_Clear();
            return NULL;
        }
        if (n < 32) {
            *p++ = (char)(0xa0 | n);
            memcpy(p, s, (size_t)n);
            return p + n;
        }
        return put_sized(p, s, n, 0xd9, 0xda, 0xdb);
    }
    return put_sized(p, PyBytes_AS_STRING(value), PyBytes_GET_SIZE(value), 0xc4, 0xc5, 0xc6);
}
/* Read one plain value and advance *at. NULL without an exception: the value is not plain, or malformed, and Python
 * decides. */
PyObject *get_plain(const unsigned char **at, const unsigned char *end) {
    const unsigned char *p = *at;
    if (p >= end) return NULL;
    unsigned char head = *p++;
    Py_ssize_t left = end - p, n;
    int text = 1;
#define NEED(k) \
    if (left < (k)) return NULL
    if (head < 0x80) {
        *at = p;
        return PyLong_FromLong(head);
    }
    if (head >= 0xe0) {
        *at = p;
        return PyLong_FromLong((signed char)head);
    }
    if ((head & 0xe0) == 0xa0) {
        n = head & 0x1f;
        goto sized;
    }
    switch (head) {
    case 0xc0: *at = p; return Py_NewRef(Py_None);
    case 0xc2: *at = p; return Py_NewRef(Py_False);
    case 0xc3: *at = p; return Py_NewRef(Py_True);
    case 0xcb: {
        NEED(8);
        uint64_t bits = get_big(p, 8);
        double d;
        memcpy(&d, &bits, 8);
        *at = p + 8;
        return PyFloat_FromDouble(d);
    }
    case 0xcc:
        NEED(1);
        *at = p + 1;
        return PyLong_FromLong(p[0]);
    case 0xcd:
        NEED(2);
        *at = p + 2;
        return PyLong_FromLong((long)get_big(p, 2));
    case 0xce:
        NEED(4);
        *at = p + 4;
        return PyLong_FromUnsignedLong((unsigned long)get_big(p, 4));
    case 0xcf:
        NEED(8);
        *at = p + 8;
        return PyLong_FromUnsignedLongLong(get_big(p, 8));
    case 0xd0:
        NEED(1);
        *at = p + 1;
        return PyLong_FromLong((int8_t)p[0]);
    case 0xd1:
        NEED(2);
        *at = p + 2;
        return PyLong_FromLong((int16_t)get_big(p, 2));
    case 0xd2:
        NEED(4);
        *at = p + 4;
        return PyLong_FromLong((int32_t)get_big(p, 4));
    case 0xd3:
        NEED(8);
        *at = p + 8;
        return PyLong_FromLongLong((int64_t)get_big(p, 8));
    case 0xc4: text = 0; /* fall through */
    case 0xd9:
        NEED(1);
        n = (Py_ssize_t)get_big(p, 1);
        p += 1;
        break;
    case 0xc5: text = 0; /* fall through */
    case 0xda:
        NEED(2);
        n = (Py_ssize_t)get_big(p, 2);
        p += 2;
        break;
    case 0xc6: text = 0; /* fall through */
    case 0xdb:
        NEED(4);
        n = (Py_ssize_t)get_big(p, 4);
        p += 4;
        break;
    default: return NULL;
    }
#undef NEED
sized:
    if (end - p < n) return NULL;
    *at = p + n;
    if (!text) return PyBytes_FromStringAndSize((const char *)p, n);
    PyObject *value = PyUnicode_DecodeUTF8((const char *)p, n, NULL);
    if (!value) PyErr_Clear();
    return value;
}
