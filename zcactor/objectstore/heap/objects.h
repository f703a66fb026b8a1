/* The Python half of the extension: the objects over a heap, and the state of the module.
 *
 * The rule: after code that may run Python, or that releases the interpreter lock or the heap's lock, read every field
 * again; own every object that is used across it. Such code is `Py_BEGIN_ALLOW_THREADS`, `PyGILState_Ensure`, the
 * conversion of an argument, the making of an object, and the last Py_DECREF of an object. A method's caller owns its
 * object, which owns its `Shared`, whose heap_t never changes.
 */
#ifndef ZCACTOR_OBJECTS_H
#define ZCACTOR_OBJECTS_H
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include "heap.h"

typedef struct { /* the owner of a heap_t, for the Heap and the handlers of NumPy */
    heap_t *heap;
    Py_ssize_t owners; /* changed under the interpreter lock */
    PyObject *when_full; /* function that frees memory, or NULL; set by the Heap, and NULL once that is gone */
} Shared;

typedef struct {
    PyObject_HEAD
    Shared *shared; /* NULL only while the object is being made */
    PyObject *fallocate; /* a test's function; NULL: the system's */
    PyObject *weakrefs;
} Heap;

typedef struct { /* state of the module */
    PyTypeObject *heap_type, *hold_type;
    PyObject *out_of_memory; /* zcactor.errors.OutOfMemory */
} State;

/* Builds that look for leaked objects count the objects (native/_living.h). */
#ifdef COUNT_LIVING
#define LIVING(change) note_living(change)
#else
#define LIVING(change) ((void)0)
#endif

#pragma GCC visibility push(hidden)

/* heap.c */
extern PyType_Spec heap_spec;
void shared_drop(Shared *shared);

/* hold.c */
extern PyType_Spec hold_spec;
PyObject *new_hold(Heap *self, uint64_t offset, uint64_t nbytes, uint64_t id);

/* numpy_handler.c */
PyObject *heap_use(Heap *self, PyObject *arg);
PyObject *use_handler(PyObject *module, PyObject *capsule);
PyObject *allocate_elsewhere(PyObject *module, PyObject *ignored);

/* module.c */
State *state_of(Heap *self);
void note_living(Py_ssize_t change);

#pragma GCC visibility pop
#endif
