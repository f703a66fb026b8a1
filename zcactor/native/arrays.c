/* Arrays of NumPy: their addresses, and loans, for which they are read-only while members of a group read them; see
 * zcactor/collectives/borrowing.py. The interpreter lock keeps each step whole. */
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
/* reopen(array) */
PyObject *hot_reopen(PyObject *Py_UNUSED(module), PyObject *array) {
    if (import_numpy() < 0) return NULL;
    if (!PyArray_Check(array)) return PyErr_Format(PyExc_TypeError, "an array is needed, not %.80s", Py_TYPE(array)->tp_name);
    PyArray_ENABLEFLAGS((PyArrayObject *)array, NPY_ARRAY_WRITEABLE);
    Py_RETURN_NONE;
}
/* lend(array) */
PyObject *hot_lend(PyObject *module, PyObject *array) {
    State *state = PyModule_GetState(module);
    if (import_numpy() < 0) return NULL;
    if (!PyArray_Check(array)) return PyErr_Format(PyExc_TypeError, "an array is lent, not %.80s", Py_TYPE(array)->tp_name);
    PyObject *key = PyLong_FromVoidPtr(array), *entry = key ? PyDict_GetItemWithError(state->lent, key) : NULL;
    int failed = !key || (!entry && PyErr_Occurred()), lent = entry || (!failed && PyArray_ISWRITEABLE((PyArrayObject *)array));
    if (!failed && lent) {
        long count = entry ? PyLong_AsLong(PyTuple_GET_ITEM(entry, 1)) + 1 : 1;
        PyObject *made = Py_BuildValue("(Ol)", array, count);
        failed = !made || PyDict_SetItem(state->lent, key, made) < 0;
        Py_XDECREF(made);
        if (!failed) PyArray_CLEARFLAGS((PyArrayObject *)array, NPY_ARRAY_WRITEABLE);
    }
    Py_XDECREF(key);
    return failed ? NULL : PyBool_FromLong(lent);
}
/* give_back(array) */
PyObject *hot_give_back(PyObject *module, PyObject *array) {
    State *state = PyModule_GetState(module);
    PyObject *key = PyLong_FromVoidPtr(array), *entry = key ? PyDict_GetItemWithError(state->lent, key) : NULL;
    if (key && !entry && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "this array was not lent");
    int failed = !entry;
    long count = entry ? PyLong_AsLong(PyTuple_GET_ITEM(entry, 1)) - 1 : 0;
    if (!failed && count) {
        PyObject *made = Py_BuildValue("(Ol)", array, count);
        failed = !made || PyDict_SetItem(state->lent, key, made) < 0;
        Py_XDECREF(made);
    } else if (!failed) {
        failed = PyDict_DelItem(state->lent, key) < 0;
        PyObject *done = failed ? NULL : PyObject_CallMethodOneArg(array, state->str_setflags, Py_True);
        if (!done && !failed && PyErr_ExceptionMatches(PyExc_ValueError))
            PyErr_Clear(); /* NumPy refuses where the memory was sealed meanwhile: it was passed to an actor as well */
        else failed = !done;
        Py_XDECREF(done);
    }
    Py_XDECREF(key);
    if (failed) return NULL;
    Py_RETURN_NONE;
}
