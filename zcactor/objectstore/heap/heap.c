/* The heap for Python.
 *
 * The rule: after a call that may run Python, read every field again; own every object that is used across the call.
 * See objects.h.
 */
#include "objects.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---------------------------------------------------------------- life */

void shared_drop(Shared *shared) {
    if (--shared->owners == 0) {
        LIVING(-1);
        heap_free(shared->heap);
        PyMem_Free(shared);
    }
}
/* h->fallocate by way of a Python function, which raises OSError. Called without the interpreter lock. */
static int call_fallocate(heap_t *h, uint64_t offset, uint64_t nbytes) {
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *fallocate = Py_XNewRef((PyObject *)h->context);
    if (!fallocate) { /* the Heap has been deallocated */
        PyGILState_Release(state);
        return posix_take(h, offset, nbytes);
    }
    int code = 0;
    unsigned long long at = offset, size = nbytes;
    PyObject *done = PyObject_CallFunction(fallocate, "iKK", h->fd, at, size);
    Py_DECREF(fallocate);
    if (!done) {
        PyObject *type, *error, *traceback, *number = NULL;
        PyErr_Fetch(&type, &error, &traceback);
        PyErr_NormalizeException(&type, &error, &traceback);
        if (error) number = PyObject_GetAttrString(error, "errno");
        code = number ? (int)PyLong_AsLong(number) : 0;
        PyErr_Clear();
        if (code <= 0) code = EIO;
        Py_XDECREF(number);
        Py_XDECREF(type);
        Py_XDECREF(error);
        Py_XDECREF(traceback);
    }
    Py_XDECREF(done);
    PyGILState_Release(state);
    return code;
}
static PyObject *heap_make(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"fd", "nbytes", "extent_nbytes", "fallocate", NULL};
    int fd;
    unsigned long long nbytes, extent = (unsigned long long)64 << 20;
    PyObject *fallocate = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iK|KO", names, &fd, &nbytes, &extent, &fallocate)) return NULL;
    int odd = nbytes == 0 || nbytes % PAGE || extent == 0 || extent % PAGE || nbytes > (uint64_t)INT64_MAX / 2;
    if ((fd >= 0 || fd == ANONYMOUS) && odd) {
        static const char wrong[] = "a heap of %llu bytes in extents of %llu: both are whole pages, and not nothing";
        return PyErr_Format(PyExc_ValueError, wrong, nbytes, extent);
    }
    Heap *self = (Heap *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    Shared *shared = PyMem_Calloc(1, sizeof *shared);
    heap_t *h = shared ? heap_new(fd, nbytes, extent) : NULL;
    if (!h) {
        if (shared) PyErr_SetFromErrno(PyExc_OSError);
        else PyErr_NoMemory();
        PyMem_Free(shared);
        Py_DECREF(self);
        return NULL;
    }
    shared->heap = h;
    shared->owners = 1;
    LIVING(1);
    self->shared = shared;
    if (fallocate != Py_None) {
        self->fallocate = Py_NewRef(fallocate);
        h->context = fallocate;
        h->fallocate = call_fallocate;
        h->huge_on_advice = 0; /* the function is called for all memory */
    }
    return (PyObject *)self;
}
static int heap_traverse(Heap *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->fallocate);
    if (self->shared) Py_VISIT(self->shared->when_full);
    return 0;
}
/* The heap_t outlives the object where arrays of NumPy are left. It must not find the function. */
static int heap_clear(Heap *self) {
    if (self->fallocate) {
        self->shared->heap->fallocate = posix_take;
        self->shared->heap->context = NULL;
    }
    Py_CLEAR(self->fallocate);
    if (self->shared) Py_CLEAR(self->shared->when_full);
    return 0;
}
static void heap_dealloc(Heap *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    if (self->weakrefs) PyObject_ClearWeakRefs((PyObject *)self);
    if (self->shared) {
        Py_BEGIN_ALLOW_THREADS
        heap_close(self->shared->heap);
        Py_END_ALLOW_THREADS
    }
    heap_clear(self);
    if (self->shared) shared_drop(self->shared);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

/* ---------------------------------------------------------------- blocks, and memory behind them */

static int sizes(PyObject *const *args, Py_ssize_t nargs, uint64_t *first, uint64_t *second) {
    if (nargs != 2) { PyErr_SetString(PyExc_TypeError, "two numbers are wanted"); return -1; }
    long long one = PyLong_AsLongLong(args[0]), two = PyErr_Occurred() ? 0 : PyLong_AsLongLong(args[1]);
    if (PyErr_Occurred()) return -1;
    if (one < 0 || two < 0) {
        PyErr_Format(PyExc_ValueError, "%lld and %lld: no extent and no range is negative", one, two);
        return -1;
    }
    *first = (uint64_t)one;
    *second = (uint64_t)two;
    return 0;
}
/* Allocate a block for (nbytes, alignment=64); -1 with an exception. The block has no memory yet. The number of bytes
 * goes to `asked`, and the block's id to `id`, if that is not NULL. */
static int64_t allocate_for(Heap *self, PyObject *const *args, Py_ssize_t nargs, uint64_t *asked, uint64_t *id) {
    int beyond = 0;
    long long nbytes = nargs >= 1 ? PyLong_AsLongLongAndOverflow(args[0], &beyond) : -1;
    long long alignment = nargs == 2 ? PyLong_AsLongLong(args[1]) : 64;
    if (PyErr_Occurred()) return -1;
    if (beyond > 0) nbytes = INT64_MAX;
    if (nargs < 1 || nargs > 2) { PyErr_SetString(PyExc_TypeError, "wanted: nbytes, alignment=64"); return -1; }
    if (nbytes <= 0) {
        PyErr_Format(PyExc_ValueError, "cannot allocate %lld bytes: a block has at least 1", nbytes);
        return -1;
    }
    if (alignment <= 0 || alignment & (alignment - 1)) {
        PyErr_Format(PyExc_ValueError, "alignment %lld is not a power of two", alignment);
        return -1;
    }
    heap_t *h = self->shared->heap;
    *asked = (uint64_t)nbytes;
    int64_t offset = allocate_with_id(h, *asked, (uint64_t)alignment, 0, id);
    if (offset >= 0) return offset;
    pthread_mutex_lock(&h->lock);
    settle(h);
    uint64_t used = h->used, capacity = h->base ? h->nbytes : h->capacity, free = largest_free(h);
    pthread_mutex_unlock(&h->lock);
    State *state = state_of(self);
    if (!state) return -1;
    PyObject *out_of_memory = Py_NewRef(state->out_of_memory);
    PyObject *error = PyObject_CallFunction(out_of_memory, "OKKK", args[0], (unsigned long long)used,
                                            (unsigned long long)capacity, (unsigned long long)free);
    if (error) PyErr_SetObject(out_of_memory, error);
    Py_XDECREF(error);
    Py_DECREF(out_of_memory);
    return -1;
}
static PyObject *heap_allocate(Heap *self, PyObject *const *args, Py_ssize_t nargs) {
    uint64_t nbytes;
    int64_t offset = allocate_for(self, args, nargs, &nbytes, NULL);
    return offset < 0 ? NULL : PyLong_FromLongLong(offset);
}
static PyObject *heap_free_block(Heap *self, PyObject *arg) {
    long long offset = PyLong_AsLongLong(arg);
    if (offset == -1 && PyErr_Occurred()) return NULL;
    if (release(self->shared->heap, (uint64_t)offset, 0) < 0)
        return PyErr_Format(PyExc_ValueError,
                            "nothing is allocated at offset %lld: it was freed before, or never handed out", offset);
    Py_RETURN_NONE;
}
static PyObject *heap_grow(Heap *self, PyObject *const *args, Py_ssize_t nargs) {
    uint64_t offset, nbytes;
    if (sizes(args, nargs, &offset, &nbytes) < 0) return NULL;
    heap_t *h = self->shared->heap;
    if (h->base) { PyErr_SetString(PyExc_ValueError, "a heap with memory grows by itself"); return NULL; }
    pthread_mutex_lock(&h->lock);
    int code = grow(h, offset, nbytes);
    pthread_mutex_unlock(&h->lock);
    if (code == ENOMEM) return PyErr_NoMemory();
    if (code)
        return PyErr_Format(PyExc_ValueError,
                            "the extent of %llu bytes at offset %llu is empty, beyond the end, or overlaps one added "
                            "before", (unsigned long long)nbytes, (unsigned long long)offset);
    Py_RETURN_NONE;
}
/* Parse (offset, nbytes), a range of the arena. Returns 0, or -1 with an exception. */
static int range(const heap_t *h, PyObject *const *args, Py_ssize_t nargs, uint64_t *offset, uint64_t *nbytes) {
    if (sizes(args, nargs, offset, nbytes) < 0) return -1;
    if (h->base && *offset <= h->nbytes && *nbytes <= h->nbytes - *offset) return 0;
    PyErr_Format(PyExc_ValueError, "%llu bytes at %llu are not inside an arena of %llu bytes",
                 (unsigned long long)*nbytes, (unsigned long long)*offset, (unsigned long long)h->nbytes);
    return -1;
}
/* commit(offset, nbytes): take memory for the range, which the caller owns; OSError when the system has none left. */
static PyObject *heap_commit(Heap *self, PyObject *const *args, Py_ssize_t nargs) {
    uint64_t offset, nbytes;
    heap_t *h = self->shared->heap;
    if (range(h, args, nargs, &offset, &nbytes) < 0) return NULL;
    if (h->fd < 0 && (!h->anonymous || (h->closed && h->count == 0))) {
        PyErr_SetString(PyExc_ValueError, "the arena is closed");
        return NULL;
    }
    if (missing(h, offset, nbytes) == 0) Py_RETURN_NONE;
    int code;
    Py_BEGIN_ALLOW_THREADS
    code = commit_surely(h, offset, nbytes);
    Py_END_ALLOW_THREADS
    if (code) { errno = code; return PyErr_SetFromErrno(PyExc_OSError); }
    Py_RETURN_NONE;
}
/* seed(number): draw the ids of blocks from this number, and not from the system. Once, before any block has an id. */
static PyObject *heap_seed(Heap *self, PyObject *arg) {
    unsigned long long seed = PyLong_AsUnsignedLongLong(arg);
    if (PyErr_Occurred()) return NULL;
    self->shared->heap->seed = seed ? seed : 1;
    Py_RETURN_NONE;
}
/* Copy the texts in (limit, usage, statistics, inactive). Returns 0, or -1 with an exception. */
static int read_group(group_t *group, PyObject *given) {
    const char *limit, *usage, *statistics, *inactive;
    PyObject *texts = PySequence_Tuple(given); /* owns the texts until they are copied */
    int code = texts && PyArg_ParseTuple(texts, "ssss", &limit, &usage, &statistics, &inactive) ? 0 : -1;
    if (code == 0) {
        group_t copy = {strdup(limit), strdup(usage), strdup(statistics), strdup(inactive)};
        *group = copy;
        if (!copy.limit || !copy.usage || !copy.statistics || !copy.inactive) { PyErr_NoMemory(); code = -1; }
    }
    Py_XDECREF(texts);
    return code;
}
/* limit_by(groups): make commit fail with EDQUOT where one of these control groups has too little memory left. Once,
 * before any commit. */
static PyObject *heap_limit_by(Heap *self, PyObject *arg) {
    PyObject *given = PySequence_Tuple(arg);
    if (!given) return NULL;
    Py_ssize_t n = PyTuple_GET_SIZE(given);
    group_t *groups = n ? calloc((size_t)n, sizeof *groups) : NULL;
    int code = n && !groups ? -1 : 0;
    if (code) PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < n && code == 0; i++) code = read_group(groups + i, PyTuple_GET_ITEM(given, i));
    Py_DECREF(given);
    heap_t *h = self->shared->heap;
    if (code == 0 && h->groups) {
        PyErr_SetString(PyExc_ValueError, "the heap has its control groups already");
        code = -1;
    }
    if (code) { free_groups(groups, groups ? (size_t)n : 0); return NULL; }
    h->groups = groups;
    h->ngroups = (unsigned)n;
    Py_RETURN_NONE;
}
/* pin(offset, nbytes): take memory for the range, owned or not, and never give it back; OSError: the system has
 * none. */
static PyObject *heap_pin(Heap *self, PyObject *const *args, Py_ssize_t nargs) {
    uint64_t offset, nbytes;
    heap_t *h = self->shared->heap;
    if (range(h, args, nargs, &offset, &nbytes) < 0) return NULL;
    int code;
    Py_BEGIN_ALLOW_THREADS
    code = pin(h, offset, nbytes);
    Py_END_ALLOW_THREADS
    if (code < 0) { PyErr_SetString(PyExc_ValueError, "the arena is closed"); return NULL; }
    if (code) { errno = code; return PyErr_SetFromErrno(PyExc_OSError); }
    Py_RETURN_NONE;
}
static PyObject *heap_unpin_all(Heap *self, PyObject *Py_UNUSED(ignored)) {
    Py_BEGIN_ALLOW_THREADS
    unpin_all(self->shared->heap);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}
static PyObject *heap_take(Heap *self, PyObject *const *args, Py_ssize_t nargs) {
    uint64_t nbytes, id;
    int64_t offset = allocate_for(self, args, nargs, &nbytes, &id);
    return offset < 0 ? NULL : new_hold(self, (uint64_t)offset, nbytes, id);
}
/* around(offset): the beginning of the allocated block that contains the offset; -1 without such a block. */
static PyObject *heap_around(Heap *self, PyObject *arg) {
    uint64_t offset = PyLong_AsUnsignedLongLong(arg);
    if (PyErr_Occurred()) return NULL;
    heap_t *h = self->shared->heap;
    pthread_mutex_lock(&h->lock);
    uint32_t n = block_around(h, offset);
    int64_t found = n == NIL ? -1 : (int64_t)h->blocks[n].offset;
    pthread_mutex_unlock(&h->lock);
    return PyLong_FromLongLong(found);
}
/* adopt(offset): add a holder to the block that begins there, which NumPy has allocated. None: no block begins there,
 * or it belongs to no array. */
static PyObject *heap_adopt(Heap *self, PyObject *arg) {
    uint64_t offset = PyLong_AsUnsignedLongLong(arg);
    if (PyErr_Occurred()) return NULL;
    heap_t *h = self->shared->heap;
    pthread_mutex_lock(&h->lock);
    uint32_t n = h->closed ? NIL : block_from(h, offset);
    if (n != NIL && !h->blocks[n].of_numpy) n = NIL;
    uint64_t nbytes = 0, id = 0;
    if (n != NIL) {
        h->blocks[n].holders++;
        nbytes = h->blocks[n].asked;
        id = id_of(h, n);
    }
    pthread_mutex_unlock(&h->lock);
    if (n == NIL) Py_RETURN_NONE;
    return new_hold(self, offset, nbytes, id);
}
/* is_private(offset): whether a forked child sees the block around it, so that peers do not see what is written to it
 * from now on. */
static PyObject *heap_is_private(Heap *self, PyObject *arg) {
    uint64_t offset = PyLong_AsUnsignedLongLong(arg);
    if (PyErr_Occurred()) return NULL;
    heap_t *h = self->shared->heap;
    if (!__atomic_load_n(&h->nprivate, __ATOMIC_RELAXED)) Py_RETURN_FALSE;
    pthread_mutex_lock(&h->lock);
    uint32_t n = block_around(h, offset);
    int seen = n != NIL && h->blocks[n].seen;
    pthread_mutex_unlock(&h->lock);
    return PyBool_FromLong(seen);
}
/* show(offset, yes): whether the program has an array over the block that begins there. A fork leaves other blocks, in
 * which results are being put together, shared with the processes that write to them. */
static PyObject *heap_show(Heap *self, PyObject *const *args, Py_ssize_t nargs) {
    uint64_t offset, yes;
    if (sizes(args, nargs, &offset, &yes) < 0) return NULL;
    heap_t *h = self->shared->heap;
    pthread_mutex_lock(&h->lock);
    uint32_t n = block_from(h, offset);
    if (n != NIL) h->blocks[n].shown = yes != 0;
    pthread_mutex_unlock(&h->lock);
    Py_RETURN_NONE;
}
/* trim(keep, at_most): give back memory of free blocks until at most `keep` bytes are committed. Returns the bytes
 * given back. */
static PyObject *heap_trim(Heap *self, PyObject *const *args, Py_ssize_t nargs) {
    uint64_t keep, at_most, given;
    if (sizes(args, nargs, &keep, &at_most) < 0) return NULL;
    Py_BEGIN_ALLOW_THREADS
    given = trim(self->shared->heap, keep, at_most);
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLongLong(given);
}
/* watch(event_fd, idle_limit): make the eventfd readable once more than that many bytes are idle; -1 stops it. Returns
 * the largest number of bytes in use at one time since the last call. */
static PyObject *heap_watch(Heap *self, PyObject *args) {
    int fd;
    unsigned long long limit;
    if (!PyArg_ParseTuple(args, "iK", &fd, &limit)) return NULL;
    heap_t *h = self->shared->heap;
    pthread_mutex_lock(&h->lock);
    uint64_t peak = h->peak;
    h->peak = h->used;
    h->event_fd = h->closed ? -1 : fd;
    h->idle_limit = limit;
    h->told = 0;
    tell_if_idle(h); /* from blocks that were freed before the call */
    pthread_mutex_unlock(&h->lock);
    return PyLong_FromUnsignedLongLong(peak);
}
/* watch_growth(event_fd, limit): make the eventfd readable, once, when the end of a block lies above the limit, now or
 * later; -1 stops it. */
static PyObject *heap_watch_growth(Heap *self, PyObject *args) {
    int fd;
    unsigned long long limit;
    if (!PyArg_ParseTuple(args, "iK", &fd, &limit)) return NULL;
    heap_t *h = self->shared->heap;
    pthread_mutex_lock(&h->lock);
    h->growth_fd = h->closed ? -1 : fd;
    h->growth_limit = limit;
    tell_of_growth(h);
    pthread_mutex_unlock(&h->lock);
    Py_RETURN_NONE;
}
static PyObject *heap_shut(Heap *self, PyObject *Py_UNUSED(ignored)) {
    Py_BEGIN_ALLOW_THREADS
    heap_close(self->shared->heap);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}
/* when_full(give_up): call the function, with the interpreter lock, when NumPy's memory does not fit; true: it freed
 * some. */
static PyObject *heap_when_full(Heap *self, PyObject *give_up) {
    Py_XSETREF(self->shared->when_full, Py_NewRef(give_up));
    Py_RETURN_NONE;
}

/* ---------------------------------------------------------------- figures */

enum { FD, ADDRESS, NBYTES, CAPACITY, USED, OF_NUMPY, COMMITTED, PINNED, IDLE, RETIRED_NBYTES, HIGH, LARGEST_FREE, TAIL_FREE, CLOSED };
static PyObject *heap_get(Heap *self, void *which) {
    heap_t *h = self->shared->heap;
    pthread_mutex_lock(&h->lock);
    long long value = 0;
    switch ((intptr_t)which) {
    case FD: value = h->fd; break;
    case ADDRESS: value = (long long)(uintptr_t)h->base; break;
    case NBYTES: value = (long long)h->nbytes; break;
    case CAPACITY: value = (long long)h->capacity; break;
    case USED: value = (long long)h->used; break;
    case OF_NUMPY: value = (long long)h->of_numpy; break;
    case COMMITTED: value = (long long)h->committed; break;
    case PINNED: value = (long long)h->pinned; break;
    case IDLE: value = (long long)idle(h); break;
    case RETIRED_NBYTES: value = (long long)h->retired; break;
    case HIGH: value = (long long)h->high; break;
    case LARGEST_FREE: settle(h); value = (long long)largest_free(h); break;
    case TAIL_FREE: settle(h); value = (long long)tail_free(h); break;
    case CLOSED: value = h->closed; break;
    }
    pthread_mutex_unlock(&h->lock);
    return PyLong_FromLongLong(value);
}
static Py_ssize_t heap_len(Heap *self) {
    heap_t *h = self->shared->heap;
    pthread_mutex_lock(&h->lock);
    Py_ssize_t count = (Py_ssize_t)h->count;
    pthread_mutex_unlock(&h->lock);
    return count;
}

/* ---------------------------------------------------------------- the type */

#define FAST(function) (PyCFunction)(void (*)(void))function, METH_FASTCALL
static PyMethodDef methods[] = {
    {"allocate", FAST(heap_allocate), "allocate(nbytes, alignment=64) -> offset, with no memory behind it yet"},
    {"free", (PyCFunction)heap_free_block, METH_O, "free(offset): remove one holder of the block"},
    {"grow", FAST(heap_grow), "grow(offset, nbytes): add an extent, to a heap without memory"},
    {"commit", FAST(heap_commit), "commit(offset, nbytes): take memory for the range"},
    {"limit_by", (PyCFunction)heap_limit_by, METH_O,
     "limit_by(groups): (limit, usage, statistics, inactive) of each, paths and a line's name"},
    {"pin", FAST(heap_pin), "pin(offset, nbytes): take memory for the range, and never give it back"},
    {"unpin_all", (PyCFunction)heap_unpin_all, METH_NOARGS, "unpin_all(): let pinned memory be given back"},
    {"take", FAST(heap_take), "take(nbytes, alignment=64) -> Hold: allocate, and free with the object"},
    {"around", (PyCFunction)heap_around, METH_O, "around(offset) -> beginning of the block that contains it, or -1"},
    {"adopt", (PyCFunction)heap_adopt, METH_O, "adopt(offset) -> Hold, a further holder of NumPy's memory, or None"},
    {"is_private", (PyCFunction)heap_is_private, METH_O,
     "is_private(offset) -> whether a forked child sees the block around it"},
    {"show", FAST(heap_show), "show(offset, yes): note whether the program has an array over the block"},
    {"trim", FAST(heap_trim), "trim(keep, at_most) -> bytes given back to the system"},
    {"seed", (PyCFunction)heap_seed, METH_O, "seed(number): draw the ids of blocks from it"},
    {"watch", (PyCFunction)heap_watch, METH_VARARGS,
     "watch(event_fd, idle_limit) -> most bytes in use since the last call"},
    {"watch_growth", (PyCFunction)heap_watch_growth, METH_VARARGS,
     "watch_growth(event_fd, limit): signal the first block above the limit, once"},
    {"use", (PyCFunction)heap_use, METH_O, "use(min_nbytes) -> handler: make NumPy allocate here, in this context"},
    {"when_full", (PyCFunction)heap_when_full, METH_O,
     "when_full(give_up): call it when an array of NumPy's does not fit; true: try again"},
    {"close", (PyCFunction)heap_shut, METH_NOARGS, "close(): allocate nothing more; allocated blocks stay"},
    {NULL, NULL, 0, NULL}};
#define GET(name, which, doc) {name, (getter)heap_get, NULL, doc, (void *)(intptr_t)(which)}
static PyGetSetDef getset[] = {
    GET("fd", FD, "The arena's file; -1 once closed and empty."), GET("address", ADDRESS, "Address of the mapping."),
    GET("nbytes", NBYTES, "Bytes of the file."), GET("capacity", CAPACITY, "Bytes of all extents."),
    GET("used", USED, "Bytes allocated, rounding included."),
    GET("of_numpy", OF_NUMPY, "Bytes allocated for arrays that own them."),
    GET("committed", COMMITTED, "Bytes of memory taken from the system."),
    GET("pinned", PINNED, "Bytes of memory that are never given back."),
    GET("idle", IDLE, "Bytes committed, free, and not pinned."),
    GET("retired", RETIRED_NBYTES, "Bytes that no array of this process has, and that a forked child may read."),
    GET("high", HIGH, "End of the highest block that was ever handed out."),
    GET("largest_free", LARGEST_FREE, "Bytes of the largest block that could be allocated."),
    GET("tail_free", TAIL_FREE, "Bytes of the free block at the highest address."),
    GET("closed", CLOSED, "1 once nothing is allocated any more."), {NULL, NULL, NULL, NULL, NULL}};
static PyMemberDef members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Heap, weakrefs), READONLY, NULL}, {NULL, 0, 0, 0, NULL}};
static PyType_Slot slots[] = {
    {Py_tp_doc, "Heap(fd, nbytes, extent_nbytes=64 MiB, fallocate=None): the free and held bytes of an arena. "
                "With fd -1 it has offsets alone; with -2 memory without a file."},
    {Py_tp_new, heap_make},
    {Py_tp_traverse, heap_traverse},
    {Py_tp_clear, heap_clear},
    {Py_tp_dealloc, heap_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {Py_tp_getset, getset},
    {Py_sq_length, heap_len},
    {0, NULL}};
PyType_Spec heap_spec = {
    .name = "zcactor.objectstore.heap._heap.Heap",
    .basicsize = sizeof(Heap),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots};
