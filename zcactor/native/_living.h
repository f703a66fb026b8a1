/* Counts the living objects of an extension's own types, in builds that find leaked objects (tools/sanitize.py). */
#ifndef ZCACTOR_LIVING_H
#define ZCACTOR_LIVING_H
#ifdef COUNT_LIVING
static Py_ssize_t living; /* changed under the interpreter lock */
static PyObject *counting_alloc(PyTypeObject *type, Py_ssize_t nitems) {
    PyObject *made = PyType_GenericAlloc(type, nitems);
    living += made != NULL;
    return made;
}
static void counting_free(void *object) {
    living--;
    if (PyType_IS_GC(Py_TYPE((PyObject *)object))) PyObject_GC_Del(object);
    else PyObject_Free(object);
}
static PyObject *count_living(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored)) { return PyLong_FromSsize_t(living); }
#define COUNT_OBJECTS(type) ((type)->tp_alloc = counting_alloc, (type)->tp_free = counting_free)
#define COUNT(change) (living += (change))
#define LIVING_METHOD {"living", count_living, METH_NOARGS, "Objects of this module's types that are alive."},
#else
#define COUNT_OBJECTS(type) ((void)0)
#define COUNT(change) ((void)0)
#define LIVING_METHOD
#endif
#endif
