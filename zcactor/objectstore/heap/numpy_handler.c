/* NumPy's data-memory handler on a heap (NEP 49).
 *
 * NumPy calls a handler for the memory of every array: usually with the interpreter lock held, but a handler may not
 * rely on that. From `min_nbytes` on it takes memory of the heap. Smaller blocks, and all blocks when the heap is full
 * or closed, come from the handler that was set before, so no program fails because of ours. The address of a block
 * shows its origin. Each array keeps the handler that made it, a handler keeps its heap, and so memory and code stay
 * until the last array is gone, after the runtime's end as well. NumPy owns the handler that it calls until the call is
 * over.
 *
 * The rule: after a call that may run Python, read every field again; own every object that is used across the call.
 */
#include "objects.h"
#include <string.h>
#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_2_0_API_VERSION
#include <numpy/arrayobject.h>

#define LARGE ((uint64_t)1 << 20) /* bytes from which blocks begin at pages: parts for several threads share none */
#define LONG ((uint64_t)4 << 20)  /* bytes whose committing or zeroing takes long enough to let other threads run */

/* NumPy is imported where it is to use a heap, and not with this module: 0, or -1 with an exception. */
static int import_numpy(void) {
    return PyArray_API ? 0 : _import_array();
}

typedef struct {
    PyDataMem_Handler handler; /* first, because NumPy gets its address */
    Shared *shared;
    heap_t *heap;
    size_t min_nbytes;
    PyObject *before; /* the capsule of the handler that was set before */
    PyDataMemAllocator *under;
} Handler;

static int owns(const heap_t *h, const void *p) {
    return (uintptr_t)p - (uintptr_t)h->base < h->nbytes;
}
/* Whether this thread holds the interpreter lock. With subinterpreters, PyGILState_Check always returns true. */
static int holds_lock(void) {
#if PY_VERSION_HEX >= 0x030d0000
    PyThreadState *state = PyThreadState_GetUnchecked();
#else
    PyThreadState *state = _PyThreadState_UncheckedGet(); /* of the thread that holds the lock */
#endif
    return state && state == PyGILState_GetThisThreadState();
}
/* Memory of the heap, or NULL. With `may_let_go`, other threads may run while much memory is committed or zeroed. */
static void *from_heap(heap_t *h, size_t nbytes, int zeroed, int may_let_go) {
    if (__atomic_load_n(&h->closed, __ATOMIC_RELAXED)) return NULL;
    uint64_t alignment = nbytes >= LARGE ? PAGE : 64;
    int64_t placed = allocate(h, nbytes, alignment, 1);
    if (placed < 0) return NULL;
    uint64_t offset = (uint64_t)placed, fresh = missing(h, offset, nbytes);
    int code = 0;
    if (fresh || zeroed) {
        int lets_go = may_let_go && (fresh >= LONG || (zeroed && nbytes >= LONG)) && holds_lock();
        PyThreadState *state = lets_go ? PyEval_SaveThread() : NULL;
        code = zeroed ? commit_zeroed(h, offset, nbytes) : commit_surely(h, offset, nbytes);
        if (state) PyEval_RestoreThread(state);
    }
    if (code == 0) return h->base + offset;
    release(h, offset, 1);
    return NULL;
}
/* Ask `when_full` to free memory. Returns whether it freed some, so that another attempt makes sense. */
static int gave_up(Shared *shared) {
    if (__atomic_load_n(&shared->heap->closed, __ATOMIC_RELAXED) || !holds_lock() || !shared->when_full) return 0;
    PyObject *type, *error, *traceback, *give_up = Py_NewRef(shared->when_full);
    PyErr_Fetch(&type, &error, &traceback);
    PyObject *answer = PyObject_CallNoArgs(give_up);
    int freed = answer == Py_True;
    if (!answer) PyErr_WriteUnraisable(give_up);
    Py_XDECREF(answer);
    Py_DECREF(give_up);
    PyErr_Restore(type, error, traceback);
    return freed;
}
/* Memory of the heap, or NULL. If nothing fits, memory that is kept for later is given up, and the attempt repeated. */
static void *surely_from_heap(Handler *self, size_t nbytes, int zeroed) {
    if (nbytes < self->min_nbytes) return NULL;
    void *p = from_heap(self->heap, nbytes, zeroed, 1);
    return p || !gave_up(self->shared) ? p : from_heap(self->heap, nbytes, zeroed, 1);
}
static void *handler_malloc(void *context, size_t nbytes) {
    Handler *self = context;
    void *p = surely_from_heap(self, nbytes, 0);
    return p ? p : self->under->malloc(self->under->ctx, nbytes);
}
static void *handler_calloc(void *context, size_t count, size_t each) {
    Handler *self = context;
    size_t nbytes;
    void *p = !__builtin_mul_overflow(count, each, &nbytes) ? surely_from_heap(self, nbytes, 1) : NULL;
    return p ? p : self->under->calloc(self->under->ctx, count, each);
}
static void handler_free(void *context, void *p, size_t nbytes) {
    Handler *self = context;
    if (p && owns(self->heap, p)) release(self->heap, (uint64_t)((char *)p - self->heap->base), 1);
    else self->under->free(self->under->ctx, p, nbytes);
}
static void *handler_realloc(void *context, void *p, size_t nbytes) {
    Handler *self = context;
    heap_t *h = self->heap;
    if (!p || !owns(h, p)) return self->under->realloc(self->under->ctx, p, nbytes);
    uint64_t offset = (uint64_t)((char *)p - h->base);
    pthread_mutex_lock(&h->lock);
    uint32_t n = block_from(h, offset);
    uint64_t old = n == NIL ? 0 : h->blocks[n].asked;
    pthread_mutex_unlock(&h->lock);
    if (resize(h, offset, nbytes) == 0) return p;
    /* NumPy has checked that no other array looks at the old memory, and holds the interpreter lock so that this stays
     * true. */
    void *moved = nbytes >= self->min_nbytes ? from_heap(h, nbytes, 0, 0) : NULL;
    if (!moved) moved = self->under->malloc(self->under->ctx, nbytes ? nbytes : 1);
    if (!moved) return NULL;
    memcpy(moved, p, old < nbytes ? old : nbytes);
    release(h, offset, 1);
    return moved;
}
static void handler_destroy(PyObject *capsule) {
    Handler *self = PyCapsule_GetPointer(capsule, "mem_handler");
    Py_DECREF(self->before);
    shared_drop(self->shared);
    PyMem_Free(self);
}
static Handler *ours(PyObject *capsule) {
    PyDataMem_Handler *handler = PyCapsule_GetPointer(capsule, "mem_handler");
    if (!handler) PyErr_Clear();
    return handler && handler->allocator.malloc == handler_malloc ? (Handler *)handler : NULL;
}
/* use(min_nbytes): make NumPy allocate in this heap from now on, in this context. Returns the argument of `use_handler`
 * that undoes it. */
PyObject *heap_use(Heap *self, PyObject *arg) {
    if (import_numpy() < 0) return NULL;
    size_t min_nbytes = PyLong_AsSize_t(arg);
    if (min_nbytes == (size_t)-1 && PyErr_Occurred()) return NULL;
    if (!self->shared->heap->base) { PyErr_SetString(PyExc_ValueError, "a heap without memory"); return NULL; }
    PyObject *before = PyDataMem_GetHandler();
    if (!before) return NULL;
    PyObject *under = Py_NewRef(before);
    for (Handler *h; (h = ours(under)); ) { /* never ours under ours: a closed heap would be kept for good */
        if (h->shared == self->shared && h->min_nbytes == min_nbytes) { Py_DECREF(under); return before; }
        Py_SETREF(under, Py_NewRef(h->before));
    }
    PyDataMem_Handler *below = PyCapsule_GetPointer(under, "mem_handler");
    Handler *made = below ? PyMem_Calloc(1, sizeof *made) : NULL;
    if (!made) { if (below) PyErr_NoMemory(); Py_DECREF(under); Py_DECREF(before); return NULL; }
    strcpy(made->handler.name, "zcactor");
    made->handler.version = 1;
    PyDataMemAllocator allocator = {made, handler_malloc, handler_calloc, handler_realloc, handler_free};
    made->handler.allocator = allocator;
    made->shared = self->shared;
    made->heap = self->shared->heap;
    made->min_nbytes = min_nbytes ? min_nbytes : 1;
    made->before = under;
    made->under = &below->allocator;
    self->shared->owners++;
    PyObject *capsule = PyCapsule_New(&made->handler, "mem_handler", handler_destroy);
    if (!capsule) {
        self->shared->owners--;
        Py_DECREF(under);
        PyMem_Free(made);
        Py_DECREF(before);
        return NULL;
    }
    PyObject *replaced = PyDataMem_SetHandler(capsule);
    Py_DECREF(capsule);
    Py_XDECREF(replaced);
    if (!replaced) Py_CLEAR(before);
    return before;
}
/* use_handler(capsule): make NumPy allocate by that handler in this context. Returns the handler that was set. */
PyObject *use_handler(PyObject *Py_UNUSED(module), PyObject *capsule) {
    if (import_numpy() < 0) return NULL;
    if (!PyCapsule_IsValid(capsule, "mem_handler")) {
        PyErr_SetString(PyExc_TypeError, "not a data-memory handler of NumPy");
        return NULL;
    }
    return PyDataMem_SetHandler(capsule);
}
/* allocate_elsewhere(): make NumPy allocate by the handler under ours in this context. Returns the handler that was
 * set. */
PyObject *allocate_elsewhere(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored)) {
    if (import_numpy() < 0) return NULL;
    PyObject *before = PyDataMem_GetHandler();
    if (!before) return NULL;
    PyObject *under = Py_NewRef(before);
    for (Handler *h; (h = ours(under)); ) Py_SETREF(under, Py_NewRef(h->before));
    PyObject *replaced = PyDataMem_SetHandler(under);
    Py_DECREF(under);
    Py_XDECREF(replaced);
    if (!replaced) Py_CLEAR(before);
    return before;
}
