/* The heap for Python, and NumPy's data-memory handler on it (NEP 49).
 *
 * A handler is called by NumPy for the memory of every array: usually with the interpreter lock held, but it may not rely on
 * that. From `min_nbytes` on it takes memory of the heap; what is smaller, and everything when the heap is full or closed,
 * comes from the handler that was set before, so no program fails because of us. Where a block comes from is seen by its
 * address. Each array keeps the handler that made it, a handler keeps its heap, and so memory and code stay until the last
 * array is gone, after the runtime's end as well.
 *
 * The rule: after anything that can run Python, or let go of the interpreter lock or of the heap's, read every field again, and own
 * what is used across it. `Py_BEGIN_ALLOW_THREADS`, `PyGILState_Ensure` and the last Py_DECREF of an object are such places.
 */
#define PY_SSIZE_T_CLEAN
#include "_heap.h"
#include <Python.h>
#include <structmember.h>
#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_1_25_API_VERSION
#include <numpy/arrayobject.h>
#include "../native/_living.h"

#define LARGE ((uint64_t)1 << 20)  /* from here on blocks begin at pages: parts written by several threads share none */
#define LONG ((uint64_t)4 << 20)   /* bytes whose committing or zeroing takes long enough to let other threads run */

/* ---------------------------------------------------------------- the owner of a heap_t, shared by Heap and handlers */

typedef struct {
    heap_t *heap;
    Py_ssize_t owners; /* changed under the interpreter lock */
    PyObject *when_full; /* what frees something, or NULL; holds nothing of ours */
} Shared;

static void shared_drop(Shared *shared) {
    if (--shared->owners == 0) {
        COUNT(-1);
        Py_XDECREF(shared->when_full);
        heap_free(shared->heap);
        PyMem_Free(shared);
    }
}

/* ---------------------------------------------------------------- Heap */

typedef struct {
    PyObject_HEAD
    Shared *shared;
    PyObject *fallocate; /* a test's; NULL: the system's */
    PyObject *weakrefs;
} Heap;

typedef struct { /* one holder of a block */
    PyObject_HEAD
    Heap *heap;
    uint64_t offset, id, nbytes;
} Hold;

static PyTypeObject HoldType;
static PyObject *out_of_memory; /* zcactor.errors.OutOfMemory */

/* h->fallocate for a Python function, which raises OSError. Called without the interpreter lock. */
static int call_fallocate(heap_t *h, uint64_t offset, uint64_t nbytes) {
    PyGILState_STATE state = PyGILState_Ensure();
    int code = 0;
    PyObject *done = PyObject_CallFunction((PyObject *)h->context, "iKK", h->fd, (unsigned long long)offset, (unsigned long long)nbytes);
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
static PyObject *heap_py_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"fd", "nbytes", "extent_nbytes", "fallocate", NULL};
    int fd;
    unsigned long long nbytes, extent = (unsigned long long)64 << 20;
    PyObject *fallocate = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iK|KO", names, &fd, &nbytes, &extent, &fallocate)) return NULL;
    if ((fd >= 0 || fd == ANONYMOUS) && (nbytes == 0 || nbytes % PAGE || extent == 0 || extent % PAGE || nbytes > (uint64_t)INT64_MAX / 2))
        return PyErr_Format(PyExc_ValueError, "a heap of %llu bytes in extents of %llu: both are whole pages, and not nothing", nbytes, extent);
    Heap *self = (Heap *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->shared = PyMem_Calloc(1, sizeof *self->shared);
    if (self->shared) self->shared->heap = heap_new(fd, nbytes, extent);
    if (!self->shared || !self->shared->heap) {
        if (self->shared) PyErr_SetFromErrno(PyExc_OSError);
        else PyErr_NoMemory();
        PyMem_Free(self->shared);
        self->shared = NULL;
        Py_DECREF(self);
        return NULL;
    }
    self->shared->owners = 1;
    COUNT(1);
    if (fallocate != Py_None) {
        self->fallocate = Py_NewRef(fallocate);
        self->shared->heap->context = fallocate;
        self->shared->heap->fallocate = call_fallocate;
        self->shared->heap->huge_on_advice = 0; /* every byte is asked for there */
    }
    return (PyObject *)self;
}
static void heap_py_dealloc(Heap *self) {
    if (self->weakrefs) PyObject_ClearWeakRefs((PyObject *)self);
    if (self->shared) {
        heap_t *h = self->shared->heap;
        Py_BEGIN_ALLOW_THREADS
        heap_close(h);
        Py_END_ALLOW_THREADS
        if (self->fallocate) h->fallocate = posix_take;
        shared_drop(self->shared);
    }
    Py_XDECREF(self->fallocate);
    Py_TYPE(self)->tp_free((PyObject *)self);
}
static int sizes(PyObject *const *args, Py_ssize_t nargs, uint64_t *first, uint64_t *second) {
    if (nargs != 2) { PyErr_SetString(PyExc_TypeError, "two numbers are wanted"); return -1; }
    long long one = PyLong_AsLongLong(args[0]), two = PyErr_Occurred() ? 0 : PyLong_AsLongLong(args[1]);
    if (PyErr_Occurred()) return -1;
    if (one < 0 || two < 0) { PyErr_Format(PyExc_ValueError, "%lld and %lld: no extent and no range is negative", one, two); return -1; }
    *first = (uint64_t)one;
    *second = (uint64_t)two;
    return 0;
}
/* A block for (nbytes, alignment=64), or -1 with an exception. There is no memory behind it yet. */
static int64_t allocate_for(Heap *self, PyObject *const *args, Py_ssize_t nargs) {
    int beyond = 0;
    long long nbytes = nargs >= 1 ? PyLong_AsLongLongAndOverflow(args[0], &beyond) : -1;
    long long alignment = nargs == 2 ? PyLong_AsLongLong(args[1]) : 64;
    if (PyErr_Occurred()) return -1;
    if (beyond > 0) nbytes = INT64_MAX;
    if (nargs < 1 || nargs > 2) { PyErr_SetString(PyExc_TypeError, "wanted: nbytes, alignment=64"); return -1; }
    if (nbytes <= 0) { PyErr_Format(PyExc_ValueError, "cannot allocate %lld bytes: a block has at least 1", nbytes); return -1; }
    if (alignment <= 0 || alignment & (alignment - 1)) {
        PyErr_Format(PyExc_ValueError, "alignment %lld is not a power of two", alignment);
        return -1;
    }
    heap_t *h = self->shared->heap;
    int64_t offset = allocate(h, (uint64_t)nbytes, (uint64_t)alignment, 0);
    if (offset >= 0) return offset;
    pthread_mutex_lock(&h->lock);
    settle(h);
    uint64_t used = h->used, capacity = h->base ? h->nbytes : h->capacity, free = largest_free(h);
    pthread_mutex_unlock(&h->lock);
    PyObject *error = PyObject_CallFunction(out_of_memory, "OKKK", args[0], (unsigned long long)used, (unsigned long long)capacity,
                                            (unsigned long long)free);
    if (error) { PyErr_SetObject(out_of_memory, error); Py_DECREF(error); }
    return -1;
}
static PyObject *heap_allocate(Heap *self, PyObject *const *args, Py_ssize_t nargs) {
    int64_t offset = allocate_for(self, args, nargs);
    return offset < 0 ? NULL : PyLong_FromLongLong(offset);
}
static PyObject *heap_free_block(Heap *self, PyObject *arg) {
    long long offset = PyLong_AsLongLong(arg);
    if (offset == -1 && PyErr_Occurred()) return NULL;
    if (release(self->shared->heap, (uint64_t)offset, 0) < 0)
        return PyErr_Format(PyExc_ValueError, "nothing is allocated at offset %lld: it was freed before, or never handed out", offset);
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
        return PyErr_Format(PyExc_ValueError, "the extent of %llu bytes at offset %llu is empty, beyond the end, or overlaps one added before",
                            (unsigned long long)nbytes, (unsigned long long)offset);
    Py_RETURN_NONE;
}
/* (offset, nbytes), a range of the arena; 0, or -1 with an exception. */
static int range(const heap_t *h, PyObject *const *args, Py_ssize_t nargs, uint64_t *offset, uint64_t *nbytes) {
    if (sizes(args, nargs, offset, nbytes) < 0) return -1;
    if (h->base && *offset <= h->nbytes && *nbytes <= h->nbytes - *offset) return 0;
    PyErr_Format(PyExc_ValueError, "%llu bytes at %llu are not inside an arena of %llu bytes", (unsigned long long)*nbytes,
                 (unsigned long long)*offset, (unsigned long long)h->nbytes);
    return -1;
}
/* commit(offset, nbytes): memory behind the range, which the caller owns; OSError when the system has none. */
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
/* seed(number): ids of blocks come from this number, and not from the system. Once, before any block has one. */
static PyObject *heap_seed(Heap *self, PyObject *arg) {
    unsigned long long seed = PyLong_AsUnsignedLongLong(arg);
    if (PyErr_Occurred()) return NULL;
    self->shared->heap->seed = seed ? seed : 1;
    Py_RETURN_NONE;
}
/* limit_by(groups): commit fails with EDQUOT where one of these control groups has not enough left. Once, before any commit. */
static PyObject *heap_limit_by(Heap *self, PyObject *arg) {
    heap_t *h = self->shared->heap;
    if (h->groups) { PyErr_SetString(PyExc_ValueError, "the heap has its control groups already"); return NULL; }
    PyObject *given = PySequence_Tuple(arg);
    if (!given) return NULL;
    Py_ssize_t n = PyTuple_GET_SIZE(given);
    group_t *groups = n ? calloc((size_t)n, sizeof *groups) : NULL;
    if (n && !groups) { Py_DECREF(given); return PyErr_NoMemory(); }
    Py_ssize_t done = 0;
    for (; done < n; done++) {
        const char *limit, *usage, *statistics, *inactive;
        if (!PyArg_Parse(PyTuple_GET_ITEM(given, done), "(ssss)", &limit, &usage, &statistics, &inactive)) break;
        group_t group = {strdup(limit), strdup(usage), strdup(statistics), strdup(inactive)};
        groups[done] = group;
        if (!group.limit || !group.usage || !group.statistics || !group.inactive) { done++; PyErr_NoMemory(); break; }
    }
    Py_DECREF(given);
    if (PyErr_Occurred()) {
        while (done-- > 0) {
            free(groups[done].limit);
            free(groups[done].usage);
            free(groups[done].statistics);
            free(groups[done].inactive);
        }
        free(groups);
        return NULL;
    }
    h->groups = groups;
    h->ngroups = (unsigned)n;
    Py_RETURN_NONE;
}
/* pin(offset, nbytes): memory behind the range, whoever owns it, that is never given back; OSError when the system has none. */
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
/* An object for one holder of the block at `offset`, which it takes over, also when it fails. */
static PyObject *new_hold(Heap *self, uint64_t offset) {
    heap_t *h = self->shared->heap;
    Hold *hold = PyObject_New(Hold, &HoldType);
    if (!hold) { release(h, offset, 0); return NULL; }
    pthread_mutex_lock(&h->lock);
    uint32_t n = block_from(h, offset);
    hold->offset = offset;
    hold->nbytes = h->blocks[n].asked;
    hold->id = id_of(h, n);
    pthread_mutex_unlock(&h->lock);
    hold->heap = (Heap *)Py_NewRef(self);
    COUNT(1);
    return (PyObject *)hold;
}
static PyObject *heap_take(Heap *self, PyObject *const *args, Py_ssize_t nargs) {
    int64_t offset = allocate_for(self, args, nargs);
    return offset < 0 ? NULL : new_hold(self, (uint64_t)offset);
}
/* around(offset): where the allocated block that the offset lies in begins; -1 when it lies in none. */
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
/* adopt(offset): one holder more of the block that begins there, for memory that NumPy has allocated; None: there is none, or
 * it is no array's. */
static PyObject *heap_adopt(Heap *self, PyObject *arg) {
    uint64_t offset = PyLong_AsUnsignedLongLong(arg);
    if (PyErr_Occurred()) return NULL;
    heap_t *h = self->shared->heap;
    pthread_mutex_lock(&h->lock);
    uint32_t n = h->closed ? NIL : block_from(h, offset);
    if (n != NIL && !h->blocks[n].of_numpy) n = NIL;
    if (n != NIL) h->blocks[n].holders++;
    pthread_mutex_unlock(&h->lock);
    if (n == NIL) Py_RETURN_NONE;
    return new_hold(self, offset);
}
/* trim(keep, at_most): give memory of free blocks back until no more than `keep` bytes are committed; bytes given back. */
static PyObject *heap_trim(Heap *self, PyObject *const *args, Py_ssize_t nargs) {
    uint64_t keep, at_most, given;
    if (sizes(args, nargs, &keep, &at_most) < 0) return NULL;
    Py_BEGIN_ALLOW_THREADS
    given = trim(self->shared->heap, keep, at_most);
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLongLong(given);
}
/* watch(event_fd, idle_limit): make the eventfd readable once more than that many bytes are idle; -1 stops it. Returns the most
 * bytes that were used at a time since the last call. */
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
    tell_if_idle(h); /* nobody told of what was freed before the call */
    pthread_mutex_unlock(&h->lock);
    return PyLong_FromUnsignedLongLong(peak);
}
/* watch_growth(event_fd, limit): make the eventfd readable, once, when a block ends or has ended above the limit; -1 stops it. */
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
/* when_full(give_up): called when NumPy's memory does not fit, with the interpreter lock; true: something was freed. */
static PyObject *heap_when_full(Heap *self, PyObject *give_up) {
    Py_XSETREF(self->shared->when_full, Py_NewRef(give_up));
    Py_RETURN_NONE;
}
enum { FD, ADDRESS, NBYTES, CAPACITY, USED, OF_NUMPY, COMMITTED, PINNED, IDLE, HIGH, LARGEST_FREE, TAIL_FREE, CLOSED };
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
    case HIGH: value = (long long)h->high; break;
    case LARGEST_FREE: settle(h); value = (long long)largest_free(h); break;
    case TAIL_FREE: settle(h); value = (long long)tail_free(h); break;
    case CLOSED: value = h->closed; break;
    }
    pthread_mutex_unlock(&h->lock);
    return PyLong_FromLongLong(value);
}

/* ---------------------------------------------------------------- NumPy's handler */

typedef struct {
    PyDataMem_Handler handler; /* first: NumPy gets its address */
    Shared *shared;
    heap_t *heap;
    size_t min_nbytes;
    PyObject *before; /* the capsule of the handler that was set before */
    PyDataMemAllocator *under;
} Handler;

static int owns(const heap_t *h, const void *p) {
    return (uintptr_t)p - (uintptr_t)h->base < h->nbytes;
}
/* Whether this thread holds the interpreter lock. Where there are subinterpreters PyGILState_Check always says so. */
static int holds_lock(void) {
#if PY_VERSION_HEX >= 0x030d0000
    PyThreadState *state = PyThreadState_GetUnchecked();
#else
    PyThreadState *state = _PyThreadState_UncheckedGet(); /* of whichever thread holds it */
#endif
    return state && state == PyGILState_GetThisThreadState();
}
/* Memory of the heap, or NULL. Committing or zeroing much of it takes a while, in which other threads may run if `may_let_go`. */
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
/* Whether something was freed, so that another attempt makes sense. */
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
/* The same, giving up what is kept for later where nothing fits otherwise. */
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
    /* NumPy has made sure that nobody looks at the old memory, and holds the interpreter lock so that it stays true. */
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
/* use(min_nbytes): NumPy allocates here from now on, in this context. Returns what `use_handler` takes to undo it. */
static PyObject *heap_use(Heap *self, PyObject *arg) {
    size_t min_nbytes = PyLong_AsSize_t(arg);
    if (min_nbytes == (size_t)-1 && PyErr_Occurred()) return NULL;
    if (!self->shared->heap->base) { PyErr_SetString(PyExc_ValueError, "a heap without memory"); return NULL; }
    PyObject *before = PyDataMem_GetHandler();
    if (!before) return NULL;
    PyObject *under = Py_NewRef(before);
    for (Handler *h; (h = ours(under)); ) { /* never one of ours under another: a closed heap would be kept for good */
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
/* use_handler(capsule): NumPy allocates by that handler in this context. Returns the one that was set. */
static PyObject *use_handler(PyObject *Py_UNUSED(module), PyObject *capsule) {
    if (!PyCapsule_IsValid(capsule, "mem_handler")) { PyErr_SetString(PyExc_TypeError, "not a data-memory handler of NumPy"); return NULL; }
    return PyDataMem_SetHandler(capsule);
}
/* allocate_elsewhere(): NumPy allocates by the handler under ours in this context. Returns the one that was set. */
static PyObject *allocate_elsewhere(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored)) {
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

/* ---------------------------------------------------------------- types and module */

static void hold_dealloc(Hold *self) {
    release(self->heap->shared->heap, self->offset, 0); /* takes no lock of Python's: it may run inside the garbage collector */
    Py_DECREF(self->heap);
    COUNT(-1);
    PyObject_Free(self);
}
static PyMemberDef hold_members[] = {
    {"offset", T_ULONGLONG, offsetof(Hold, offset), READONLY, "Bytes from the start of the arena."},
    {"id", T_ULONGLONG, offsetof(Hold, id), READONLY, "What peers call the block; the same for every holder."},
    {"nbytes", T_ULONGLONG, offsetof(Hold, nbytes), READONLY, "Bytes that were asked for."},
    {NULL, 0, 0, 0, NULL}};
static PyTypeObject HoldType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "zcactor.objectstore._heap.Hold", .tp_basicsize = sizeof(Hold),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, .tp_dealloc = (destructor)hold_dealloc,
    .tp_members = hold_members, .tp_doc = "One holder of a block. The block is free when the last is gone."};
#define FAST(function) (PyCFunction)(void (*)(void))function, METH_FASTCALL
static PyMethodDef heap_methods[] = {
    {"allocate", FAST(heap_allocate), "allocate(nbytes, alignment=64) -> offset, with no memory behind it yet"},
    {"free", (PyCFunction)heap_free_block, METH_O, "free(offset): one holder less"},
    {"grow", FAST(heap_grow), "grow(offset, nbytes): add an extent, to a heap without memory"},
    {"commit", FAST(heap_commit), "commit(offset, nbytes): memory behind the range"},
    {"limit_by", (PyCFunction)heap_limit_by, METH_O, "limit_by(groups): (limit, usage, statistics, inactive) of each, paths and a line's name"},
    {"pin", FAST(heap_pin), "pin(offset, nbytes): memory behind the range, never to be given back"},
    {"unpin_all", (PyCFunction)heap_unpin_all, METH_NOARGS, "What was pinned may be given back."},
    {"take", FAST(heap_take), "take(nbytes, alignment=64) -> Hold: allocate, and free with the object"},
    {"around", (PyCFunction)heap_around, METH_O, "around(offset) -> where the block it lies in begins, or -1"},
    {"adopt", (PyCFunction)heap_adopt, METH_O, "adopt(offset) -> Hold, one more holder of NumPy's memory, or None"},
    {"trim", FAST(heap_trim), "trim(keep, at_most) -> bytes given back to the system"},
    {"seed", (PyCFunction)heap_seed, METH_O, "seed(number): ids of blocks come from it"},
    {"watch", (PyCFunction)heap_watch, METH_VARARGS, "watch(event_fd, idle_limit) -> most bytes used since the last call"},
    {"watch_growth", (PyCFunction)heap_watch_growth, METH_VARARGS, "watch_growth(event_fd, limit): tell once of a block above the limit"},
    {"use", (PyCFunction)heap_use, METH_O, "use(min_nbytes) -> handler: NumPy allocates here, in this context"},
    {"when_full", (PyCFunction)heap_when_full, METH_O, "when_full(give_up): asked when an array of NumPy's does not fit; true: again"},
    {"close", (PyCFunction)heap_shut, METH_NOARGS, "Allocate nothing more. What is allocated stays."},
    {NULL, NULL, 0, NULL}};
#define GET(name, which, doc) {name, (getter)heap_get, NULL, doc, (void *)(intptr_t)(which)}
static Py_ssize_t heap_len(Heap *self) {
    heap_t *h = self->shared->heap;
    pthread_mutex_lock(&h->lock);
    Py_ssize_t count = (Py_ssize_t)h->count;
    pthread_mutex_unlock(&h->lock);
    return count;
}
static PySequenceMethods heap_sequence = {.sq_length = (lenfunc)heap_len};
static PyGetSetDef heap_getset[] = {
    GET("fd", FD, "The arena's file; -1 once closed and empty."), GET("address", ADDRESS, "Where it is mapped."),
    GET("nbytes", NBYTES, "Bytes of the file."), GET("capacity", CAPACITY, "Bytes of all extents."),
    GET("used", USED, "Bytes allocated, rounding included."), GET("of_numpy", OF_NUMPY, "Bytes allocated of arrays that own them."),
    GET("committed", COMMITTED, "Bytes of memory taken from the system."),
    GET("pinned", PINNED, "Bytes of it that are never given back."), GET("idle", IDLE, "Bytes committed, free, and not pinned."),
    GET("high", HIGH, "One past the highest offset that was ever handed out."),
    GET("largest_free", LARGEST_FREE, "Bytes of the largest block that could be had."),
    GET("tail_free", TAIL_FREE, "Bytes of the free block at the highest address."),
    GET("closed", CLOSED, "1 once nothing is allocated any more."), {NULL, NULL, NULL, NULL, NULL}};
static PyTypeObject HeapType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "zcactor.objectstore._heap.Heap", .tp_basicsize = sizeof(Heap),
    .tp_flags = Py_TPFLAGS_DEFAULT, .tp_new = heap_py_new, .tp_dealloc = (destructor)heap_py_dealloc, .tp_methods = heap_methods, .tp_as_sequence = &heap_sequence,
    .tp_getset = heap_getset, .tp_weaklistoffset = offsetof(Heap, weakrefs),
    .tp_doc = "Heap(fd, nbytes, extent_nbytes=64 MiB, fallocate=None): what is free in an arena. With fd -1, of offsets alone; with -2, in memory without a file."};
static PyMethodDef functions[] = {
    {"use_handler", use_handler, METH_O, "use_handler(handler) -> the one that was set"},
    {"allocate_elsewhere", allocate_elsewhere, METH_NOARGS, "allocate_elsewhere() -> the handler that was set; NumPy allocates by the one under ours"},
    LIVING_METHOD
    {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "zcactor.objectstore._heap", .m_size = -1,
                                        .m_methods = functions, .m_doc = "The heap of an arena; see the comment in _heap.c."};
PyMODINIT_FUNC PyInit__heap(void) {
    import_array();
    PyObject *errors = PyImport_ImportModule("zcactor.errors");
    out_of_memory = errors ? PyObject_GetAttrString(errors, "OutOfMemory") : NULL;
    Py_XDECREF(errors);
    if (!out_of_memory) return NULL;
    if (pthread_atfork(before_fork, after_fork, after_fork_in_child)) return PyErr_NoMemory();
    PyObject *module = PyModule_Create(&definition);
    if (!module) return NULL;
    COUNT_OBJECTS(&HeapType);
    if (PyType_Ready(&HeapType) < 0 || PyType_Ready(&HoldType) < 0 || PyModule_AddObjectRef(module, "Heap", (PyObject *)&HeapType) < 0 ||
        PyModule_AddObjectRef(module, "Hold", (PyObject *)&HoldType) < 0)
        Py_CLEAR(module);
    return module;
}
