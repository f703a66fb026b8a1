/* Arrays of NumPy: their addresses, and loans, for which they are read-only while members of a group read them; see
 * zcactor/collectives/lending.py. The interpreter lock keeps each step whole. */
#define IMPORTS_NUMPY
#include "hot.h"

int import_numpy(void) {
    return PyArray_API ? 0 : _import_array();
}
int is_array(PyObject *object) {
    if (!PyArray_API) {
        PyObject *name = PyUnicode_FromString("numpy"), *numpy = name ? PyImport_GetModule(name) : NULL;
        Py_XDECREF(name);
        if (!numpy) return PyErr_Occurred() ? -1 : 0; /* nobody has imported it, so there are no arrays */
        Py_DECREF(numpy);
        if (import_numpy() < 0) return -1;
    }
    return PyArray_CheckExact(object);
}
/* with_numpy(): have NumPy's functions, for the arrays in frames of which the dtypes are known. */
PyObject *hot_with_numpy(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored)) {
    if (import_numpy() < 0) return NULL;
    Py_RETURN_NONE;
}
/* address(array) */
PyObject *hot_address(PyObject *Py_UNUSED(module), PyObject *array) {
    if (import_numpy() < 0) return NULL;
    if (!PyArray_Check(array)) return PyErr_Format(PyExc_TypeError, "an array is needed, not %.80s", Py_TYPE(array)->tp_name);
    return PyLong_FromVoidPtr(PyArray_DATA((PyArrayObject *)array));
}
/* sole(array) */
PyObject *hot_sole(PyObject *Py_UNUSED(module), PyObject *array) {
    if (import_numpy() < 0) return NULL;
    if (!PyArray_Check(array)) return PyErr_Format(PyExc_TypeError, "an array is needed, not %.80s", Py_TYPE(array)->tp_name);
    for (PyObject *base = PyArray_BASE((PyArrayObject *)array); base && PyArray_Check(base);
         base = PyArray_BASE((PyArrayObject *)base))
        if (Py_REFCNT(base) != 1) Py_RETURN_FALSE;
    Py_RETURN_TRUE;
}
/* references(object) */
PyObject *hot_references(PyObject *Py_UNUSED(module), PyObject *object) { return PyLong_FromSsize_t(Py_REFCNT(object)); }
/* open(array) */
PyObject *hot_open(PyObject *Py_UNUSED(module), PyObject *array) {
    if (import_numpy() < 0) return NULL;
    if (!PyArray_Check(array)) return PyErr_Format(PyExc_TypeError, "an array is needed, not %.80s", Py_TYPE(array)->tp_name);
    PyArray_ENABLEFLAGS((PyArrayObject *)array, NPY_ARRAY_WRITEABLE);
    Py_RETURN_NONE;
}
#define LANES 8
#define PRIME 0x9e3779b185ebca87u /* odd, so that a step is a bijection of the word and of the lane */
static uint64_t digest_of(const char *p, size_t n) {
    uint64_t lanes[LANES], word, all = n;
    for (int i = 0; i < LANES; i++) lanes[i] = PRIME * (uint64_t)(i + 1);
    for (; n >= sizeof lanes; n -= sizeof lanes, p += sizeof lanes)
        for (int i = 0; i < LANES; i++) {
            memcpy(&word, p + 8 * i, 8);
            word = (lanes[i] ^ word) * PRIME;
            lanes[i] = word ^ (word >> 29); /* high bits take part in the next step, too */
        }
    for (int i = 0; n; i++) {
        size_t most = n < 8 ? n : 8;
        word = 0;
        memcpy(&word, p, most);
        word = (lanes[i] ^ word) * PRIME;
        lanes[i] = word ^ (word >> 29);
        n -= most;
        p += most;
    }
    for (int i = 0; i < LANES; i++) {
        all = (all ^ lanes[i]) * PRIME;
        all ^= all >> 32;
    }
    return all;
}
/* digest(address, nbytes) */
PyObject *hot_digest(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long address, nbytes;
    uint64_t digest;
    if (!PyArg_ParseTuple(args, "KK:digest", &address, &nbytes)) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    digest = digest_of((const char *)(uintptr_t)address, (size_t)nbytes);
    Py_END_ALLOW_THREADS;
    return PyLong_FromUnsignedLongLong(digest);
}
/* array_over(base, address, like) */
PyObject *hot_array_over(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *base, *like;
    unsigned long long address;
    if (import_numpy() < 0) return NULL;
    if (!PyArg_ParseTuple(args, "OKO!:array_over", &base, &address, &PyArray_Type, &like)) return NULL;
    PyArrayObject *given = (PyArrayObject *)like;
    PyArray_Descr *dtype = (PyArray_Descr *)Py_NewRef(PyArray_DESCR(given));
    PyObject *array = PyArray_NewFromDescr(&PyArray_Type, dtype, PyArray_NDIM(given), PyArray_DIMS(given), NULL,
                                           (void *)(uintptr_t)address, 0, NULL);
    if (array && PyArray_SetBaseObject((PyArrayObject *)array, Py_NewRef(base)) < 0) Py_CLEAR(array);
    if (array) PyArray_UpdateFlags((PyArrayObject *)array, NPY_ARRAY_UPDATE_ALL);
    return array;
}
/* An entry of `State.lent`: the array, the number of its loans, and KEPT or CLAIMED. */
#define KEPT 1    /* it was passed on meanwhile, and stays read-only */
#define CLAIMED 2 /* an operation writes its result to it */

static long field_of(PyObject *entry, int i) {
    return PyLong_AsLong(PyTuple_GET_ITEM(entry, i)); /* made here, so it is a small number */
}
/* The entry of an array, borrowed; NULL with or without an exception. */
static PyObject *entry_of(State *state, PyObject *array) {
    if (!PyDict_GET_SIZE(state->lent)) return NULL;
    PyObject *key = PyLong_FromVoidPtr(array), *entry = key ? PyDict_GetItemWithError(state->lent, key) : NULL;
    Py_XDECREF(key);
    return entry;
}
/* Enter an array with so many loans; 0 loans remove it. */
static int enter(State *state, PyObject *array, long loans, long how) {
    PyObject *key = PyLong_FromVoidPtr(array), *made = key && loans ? Py_BuildValue("(Oll)", array, loans, how) : NULL;
    int failed = !key || (loans && !made);
    if (!failed) failed = (loans ? PyDict_SetItem(state->lent, key, made) : PyDict_DelItem(state->lent, key)) < 0;
    Py_XDECREF(made);
    Py_XDECREF(key);
    return failed ? -1 : 0;
}
static int check_array(PyObject *array) {
    if (import_numpy() < 0) return -1;
    if (PyArray_Check(array)) return 0;
    PyErr_Format(PyExc_TypeError, "an array is lent, not %.80s", Py_TYPE(array)->tp_name);
    return -1;
}
/* Whether an array, or one that it is a view of, takes the result of an operation; -1 with an exception. */
int is_claimed(State *state, PyObject *array) {
    while (PyDict_GET_SIZE(state->lent) && array && PyArray_Check(array)) {
        PyObject *entry = entry_of(state, array);
        if (!entry && PyErr_Occurred()) return -1;
        if (entry && field_of(entry, 2) == CLAIMED) return 1;
        array = PyArray_BASE((PyArrayObject *)array);
    }
    return 0;
}
/* lend(array) */
PyObject *hot_lend(PyObject *module, PyObject *array) {
    State *state = PyModule_GetState(module);
    if (check_array(array) < 0) return NULL;
    PyObject *entry = entry_of(state, array);
    if (!entry && PyErr_Occurred()) return NULL;
    if (!entry && !PyArray_ISWRITEABLE((PyArrayObject *)array)) Py_RETURN_FALSE;
    if (enter(state, array, entry ? field_of(entry, 1) + 1 : 1, entry ? field_of(entry, 2) : 0) < 0) return NULL;
    PyArray_CLEARFLAGS((PyArrayObject *)array, NPY_ARRAY_WRITEABLE);
    Py_RETURN_TRUE;
}
/* claim(array) */
PyObject *hot_claim(PyObject *module, PyObject *array) {
    State *state = PyModule_GetState(module);
    if (check_array(array) < 0) return NULL;
    PyObject *entry = entry_of(state, array);
    if (!entry && PyErr_Occurred()) return NULL;
    if (entry || !PyArray_ISWRITEABLE((PyArrayObject *)array)) {
        PyErr_SetString(PyExc_ValueError, "a result is written to an array that is writable, and not lent");
        return NULL;
    }
    if (enter(state, array, 1, CLAIMED) < 0) return NULL;
    PyArray_CLEARFLAGS((PyArrayObject *)array, NPY_ARRAY_WRITEABLE);
    Py_RETURN_NONE;
}
/* claimed(array) */
PyObject *hot_claimed(PyObject *module, PyObject *array) {
    if (check_array(array) < 0) return NULL;
    int claimed = is_claimed(PyModule_GetState(module), array);
    return claimed < 0 ? NULL : PyBool_FromLong(claimed);
}
/* lent(array) */
PyObject *hot_lent(PyObject *module, PyObject *array) {
    if (check_array(array) < 0) return NULL;
    PyObject *entry = entry_of(PyModule_GetState(module), array);
    if (!entry && PyErr_Occurred()) return NULL;
    return PyBool_FromLong(entry && field_of(entry, 2) != KEPT);
}
/* keep(array) */
PyObject *hot_keep(PyObject *module, PyObject *array) {
    State *state = PyModule_GetState(module);
    if (check_array(array) < 0) return NULL;
    PyObject *entry = entry_of(state, array);
    if (!entry && PyErr_Occurred()) return NULL;
    if (entry && field_of(entry, 2) != KEPT && enter(state, array, field_of(entry, 1), KEPT) < 0) return NULL;
    PyArray_CLEARFLAGS((PyArrayObject *)array, NPY_ARRAY_WRITEABLE);
    Py_RETURN_NONE;
}
/* give_back(array) */
PyObject *hot_give_back(PyObject *module, PyObject *array) {
    State *state = PyModule_GetState(module);
    PyObject *entry = entry_of(state, array);
    if (!entry) return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "this array was not lent");
    long loans = field_of(entry, 1) - 1, how = field_of(entry, 2);
    if (enter(state, array, loans, how) < 0) return NULL;
    if (loans || how == KEPT) Py_RETURN_NONE;
    PyObject *done = PyObject_CallMethodOneArg(array, state->str_setflags, Py_True);
    if (!done) {
        if (!PyErr_ExceptionMatches(PyExc_ValueError)) return NULL;
        PyErr_Clear(); /* NumPy refuses where the memory was sealed meanwhile: it was passed to an actor as well */
    }
    Py_XDECREF(done);
    Py_RETURN_NONE;
}
