/* PyTorch's memory in the device store: the functions that PyTorch calls to allocate and to free.
 *
 * PyTorch calls them under a mutex of its own, for which another thread may wait that has the interpreter lock. So they
 * never take that lock, and never wait for a thread that takes it. Memory is handed out from extents, each with a best
 * fit of its own (objectstore/heap). Python adds extents ahead of need; where CUDA's functions are known, an extent is
 * made here when it is needed.
 *
 * One mutex guards everything. No Python runs under it.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdlib.h>
#include <string.h>
#include "../objectstore/heap/heap.h"

#define ALIGNMENT 512 /* bytes, as of PyTorch's own blocks */
#define MOST_DEVICES 64
#define MOST_ACCESS 1024 /* bytes: 64 GPUs with access, of 16 bytes at most */
#define EXPORTED __attribute__((visibility("default")))

typedef struct {
    uint64_t address, nbytes;
    int device;
    unsigned pool; /* the runtime to which it belongs */
    int made;      /* whether it was made here, by CUDA's functions */
    int taken;     /* whether Python knows it, so that peers may have the memory */
    heap_t *heap;
} extent_t;

typedef struct { /* CUDA's functions; all return 0 where they succeed */
    int (*reserve)(uint64_t *address, size_t nbytes, size_t alignment, uint64_t at, unsigned long long flags);
    int (*unreserve)(uint64_t address, size_t nbytes);
    int (*create)(uint64_t *handle, size_t nbytes, const void *properties, unsigned long long flags);
    int (*map)(uint64_t address, size_t nbytes, size_t offset, uint64_t handle, unsigned long long flags);
    int (*unmap)(uint64_t address, size_t nbytes);
    int (*allow)(uint64_t address, size_t nbytes, const void *access, size_t count);
    int (*release)(uint64_t handle);
    int (*synchronize)(void *stream);
    int (*exchange)(int *mode); /* of captures, for this thread */
} functions_t;
#define FUNCTIONS 9
#define RELAXED 2 /* CU_STREAM_CAPTURE_MODE_RELAXED: calls have nothing to do with graphs that are captured meanwhile */

typedef struct {
    unsigned pool;   /* 0: none */
    int has_functions, told, event_fd;
    functions_t call;
    unsigned char properties[64], access[MOST_ACCESS];
    size_t naccess;
    uint64_t step, extent; /* bytes: granularity, and size of an extent */
    uint64_t limit, made;  /* bytes that the runtime may have of the GPU, and those that were made here */
    uint64_t beside;       /* bytes that it has beside those */
    uint64_t keep;                      /* bytes of idle extents made here that are kept for later */
} device_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static extent_t *extents;
static size_t count, room;
static device_t devices[MOST_DEVICES];
static pid_t owner;

/* ---------------------------------------------------------------- extents; under the lock */

static extent_t *around(uint64_t address) {
    for (size_t i = 0; i < count; i++)
        if (extents[i].address <= address && address < extents[i].address + extents[i].nbytes) return extents + i;
    return NULL;
}
static uint64_t free_in(extent_t *e) {
    pthread_mutex_lock(&e->heap->lock);
    uint64_t size = largest_free(e->heap);
    pthread_mutex_unlock(&e->heap->lock);
    return size;
}
static int add_extent(unsigned pool, int device, uint64_t address, uint64_t nbytes, int made) {
    if (count == room) {
        extent_t *more = realloc(extents, (room ? 2 * room : 64) * sizeof *more);
        if (!more) return -1;
        extents = more;
        room = room ? 2 * room : 64;
    }
    heap_t *heap = heap_new(-1, 0, PAGE);
    if (!heap) return -1;
    pthread_mutex_lock(&heap->lock);
    int wrong = grow(heap, 0, nbytes);
    pthread_mutex_unlock(&heap->lock);
    if (wrong) { heap_free(heap); return -1; }
    extents[count++] = (extent_t){address, nbytes, device, pool, made, 0, heap};
    devices[device].told = 0;
    return 0;
}
static uint64_t take_from(unsigned pool, int device, uint64_t nbytes) {
    extent_t *best = NULL;
    uint64_t least = UINT64_MAX;
    for (size_t i = 0; i < count; i++)
        if (extents[i].pool == pool && extents[i].device == device) {
            uint64_t size = free_in(extents + i);
            if (size >= nbytes && size < least) { best = extents + i; least = size; }
        }
    int64_t offset = best ? allocate(best->heap, nbytes, ALIGNMENT, 0) : -1;
    return offset < 0 ? 0 : best->address + (uint64_t)offset;
}
static uint64_t left(const device_t *d) {
    uint64_t taken = d->made + d->beside;
    return d->limit > taken ? d->limit - taken : 0;
}
static int make_relaxed(device_t *d, int device, uint64_t least) {
    uint64_t nbytes = least > d->extent ? least : d->extent, address = 0, handle = 0;
    nbytes = (nbytes + d->step - 1) / d->step * d->step;
    if (nbytes > left(d)) nbytes = (least + d->step - 1) / d->step * d->step;
    if (nbytes > left(d) || d->call.reserve(&address, nbytes, 0, 0, 0)) return -1;
    int made = !d->call.create(&handle, nbytes, d->properties, 0), mapped = 0, done = 0;
    if (made) mapped = !d->call.map(address, nbytes, 0, handle, 0);
    if (mapped && !d->call.allow(address, nbytes, d->access, d->naccess))
        done = !add_extent(d->pool, device, address, nbytes, 1);
    if (!done && mapped) d->call.unmap(address, nbytes);
    if (made) d->call.release(handle); /* the memory lives on while it is mapped */
    if (!done) { d->call.unreserve(address, nbytes); return -1; }
    d->made += nbytes;
    return 0;
}
/* Make an extent by CUDA's functions. Returns 0, or -1: the GPU has no room, or the limit is reached. */
static int make_extent(device_t *d, int device, uint64_t least) {
    int mode = RELAXED, code;
    d->call.exchange(&mode);
    code = make_relaxed(d, device, least);
    d->call.exchange(&mode);
    return code;
}
/* Bytes of the extents that were made here and have no tensors. */
static uint64_t idle_in(unsigned pool, int device) {
    uint64_t idle = 0;
    for (size_t i = 0; i < count; i++)
        if (extents[i].pool == pool && extents[i].device == device && extents[i].made && !extents[i].heap->used)
            idle += extents[i].nbytes;
    return idle;
}
/* Give extents that were made here back to the GPU, which have no tensors and which no peer can have, as long as they are
 * more than `keep` bytes. Returns whether there was one. */
static int give_back(device_t *d, int device, uint64_t keep) {
    uint64_t idle = idle_in(d->pool, device);
    int given = 0, mode = RELAXED;
    d->call.exchange(&mode);
    for (size_t i = count; i-- && idle > keep;) {
        extent_t *e = extents + i;
        if (e->pool != d->pool || e->device != device || !e->made || e->taken || e->heap->used) continue;
        if (d->call.unmap(e->address, e->nbytes)) continue;
        d->call.unreserve(e->address, e->nbytes);
        heap_free(e->heap);
        idle -= e->nbytes;
        d->made -= e->nbytes;
        extents[i] = extents[--count];
        given = 1;
    }
    d->call.exchange(&mode);
    return given;
}
/* Make the eventfd readable, once, where Python is to add an extent: an allocation as large as the next may not fit. */
static void tell_if_low(device_t *d, int device) {
    uint64_t most = 0, one = 1;
    for (size_t i = 0; i < count; i++)
        if (extents[i].pool == d->pool && extents[i].device == device) {
            uint64_t size = free_in(extents + i);
            if (size > most) most = size;
        }
    if (!d->has_functions && !d->told && d->event_fd >= 0 && most < d->extent / 2)
        d->told = write(d->event_fd, &one, sizeof one) == sizeof one;
}

/* ---------------------------------------------------------------- PyTorch's functions; without the interpreter lock */

EXPORTED void *zcactor_torch_alloc(ssize_t nbytes, int device, void *stream) {
    (void)stream; /* free memory has no work left: see `zcactor_torch_free` */
    if (nbytes < 0 || device < 0 || device >= MOST_DEVICES || getpid() != owner) return NULL;
    uint64_t size = nbytes ? (uint64_t)nbytes : 1;
    pthread_mutex_lock(&lock);
    device_t *d = devices + device;
    uint64_t address = d->pool ? take_from(d->pool, device, size) : 0;
    if (!address && d->pool && d->has_functions) {
        int refused = make_extent(d, device, size);
        if (refused && give_back(d, device, 0)) refused = make_extent(d, device, size);
        if (!refused) address = take_from(d->pool, device, size);
    }
    if (d->pool) tell_if_low(d, device);
    pthread_mutex_unlock(&lock);
    return (void *)(uintptr_t)address;
}
EXPORTED void zcactor_torch_free(void *pointer, ssize_t nbytes, int device, void *stream) {
    (void)nbytes;
    if (!pointer || device < 0 || device >= MOST_DEVICES || getpid() != owner) return;
    pthread_mutex_lock(&lock);
    int (*synchronize)(void *) = devices[device].has_functions ? devices[device].call.synchronize : NULL;
    pthread_mutex_unlock(&lock);
    if (synchronize) synchronize(stream); /* as cudaFree waits, on which PyTorch relies */
    pthread_mutex_lock(&lock);
    extent_t *e = around((uint64_t)(uintptr_t)pointer);
    if (e) release(e->heap, (uint64_t)(uintptr_t)pointer - e->address, 0);
    if (e && devices[device].has_functions) give_back(devices + device, device, devices[device].keep);
    pthread_mutex_unlock(&lock);
}

/* ---------------------------------------------------------------- Python's functions */

#define UNLOCKED(...)            \
    Py_BEGIN_ALLOW_THREADS       \
    pthread_mutex_lock(&lock);   \
    __VA_ARGS__                  \
    pthread_mutex_unlock(&lock); \
    Py_END_ALLOW_THREADS

static int is_device(int device) {
    if (device >= 0 && device < MOST_DEVICES) return 1;
    PyErr_Format(PyExc_ValueError, "GPU %d: PyTorch's memory is on GPUs 0 to %d", device, MOST_DEVICES - 1);
    return 0;
}
static PyObject *py_use(PyObject *module, PyObject *args) {
    (void)module;
    unsigned pool;
    int device, event_fd;
    unsigned long long extent;
    if (!PyArg_ParseTuple(args, "iIiK", &device, &pool, &event_fd, &extent) || !is_device(device)) return NULL;
    UNLOCKED(
        owner = getpid();
        if (devices[device].pool != pool) devices[device].has_functions = 0, devices[device].made = devices[device].beside = 0;
        devices[device].pool = pool;
        devices[device].event_fd = event_fd;
        devices[device].extent = extent;
        devices[device].told = 0;
    )
    Py_RETURN_NONE;
}
static PyObject *py_make_by(PyObject *module, PyObject *args) {
    (void)module;
    int device;
    PyObject *addresses;
    Py_buffer properties, access;
    Py_ssize_t naccess;
    unsigned long long step, limit, keep;
    if (!PyArg_ParseTuple(args, "iO!y*y*nKKK", &device, &PyTuple_Type, &addresses, &properties, &access, &naccess, &step,
                          &limit, &keep))
        return NULL;
    device_t made = {0};
    int fits = properties.len <= (Py_ssize_t)sizeof made.properties && access.len <= MOST_ACCESS && step > 0;
    void *functions[FUNCTIONS] = {0};
    if (!fits || PyTuple_GET_SIZE(addresses) != FUNCTIONS)
        PyErr_SetString(PyExc_ValueError, "these are not the functions of CUDA, or their arguments are too large");
    for (int i = 0; !PyErr_Occurred() && i < FUNCTIONS; i++)
        functions[i] = PyLong_AsVoidPtr(PyTuple_GET_ITEM(addresses, i));
    if (!PyErr_Occurred() && is_device(device)) {
        memcpy(&made.call, functions, sizeof made.call);
        memcpy(made.properties, properties.buf, (size_t)properties.len);
        memcpy(made.access, access.buf, (size_t)access.len);
        UNLOCKED(
            device_t *d = devices + device;
            made.pool = d->pool;
            made.event_fd = d->event_fd;
            made.extent = d->extent;
            made.made = d->made;
            made.beside = d->beside;
            made.naccess = (size_t)naccess;
            made.step = step;
            made.limit = limit;
            made.keep = keep;
            made.has_functions = 1;
            *d = made;
        )
    }
    PyBuffer_Release(&properties);
    PyBuffer_Release(&access);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}
static PyObject *py_beside(PyObject *module, PyObject *args) {
    (void)module;
    int device, idle;
    unsigned long long nbytes, made = 0;
    if (!PyArg_ParseTuple(args, "iKp", &device, &nbytes, &idle) || !is_device(device)) return NULL;
    UNLOCKED(
        devices[device].beside = nbytes;
        if (idle && devices[device].has_functions) give_back(devices + device, device, 0);
        made = devices[device].made;
    )
    return PyLong_FromUnsignedLongLong(made);
}
/* Whether an extent was taken away here: it was made here, peers may have it, no tensor lies in it, and idle extents have
 * more than `keep` bytes. The caller unmaps it. */
static PyObject *py_take(PyObject *module, PyObject *args) {
    (void)module;
    unsigned long long address, keep;
    if (!PyArg_ParseTuple(args, "KK", &address, &keep)) return NULL;
    int taken = 0;
    UNLOCKED(
        extent_t *e = around(address);
        if (e && e->made && e->taken && !e->heap->used && idle_in(e->pool, e->device) > keep) {
            devices[e->device].made -= e->nbytes;
            heap_free(e->heap);
            *e = extents[--count];
            taken = 1;
        }
    )
    return PyBool_FromLong(taken);
}
static PyObject *py_add(PyObject *module, PyObject *args) {
    (void)module;
    unsigned pool;
    int device, code = 0;
    unsigned long long address, nbytes;
    if (!PyArg_ParseTuple(args, "IiKK", &pool, &device, &address, &nbytes) || !is_device(device)) return NULL;
    UNLOCKED(code = add_extent(pool, device, address, nbytes, 0);)
    if (code) return PyErr_NoMemory();
    Py_RETURN_NONE;
}
static PyObject *py_find(PyObject *module, PyObject *arg) {
    (void)module;
    unsigned long long address = PyLong_AsUnsignedLongLong(arg);
    if (PyErr_Occurred()) return NULL;
    extent_t found = {0};
    UNLOCKED(
        extent_t *e = around(address);
        if (e) found = *e, e->taken = 1;
    )
    if (!found.nbytes) Py_RETURN_NONE;
    unsigned long long first = found.address, nbytes = found.nbytes;
    return Py_BuildValue("IiKK", found.pool, found.device, first, nbytes);
}
static PyObject *py_take_idle(PyObject *module, PyObject *args) {
    (void)module;
    unsigned pool;
    unsigned long long keep;
    if (!PyArg_ParseTuple(args, "IK", &pool, &keep)) return NULL;
    PyObject *taken = PyList_New(0);
    for (int more = 1; more && taken;) {
        unsigned long long address = 0, idle = 0;
        UNLOCKED(
            size_t last = count;
            for (size_t i = 0; i < count; i++)
                if (extents[i].pool == pool && !extents[i].made && !extents[i].heap->used) {
                    idle += extents[i].nbytes;
                    last = i;
                }
            more = last < count && idle > keep;
            if (more) {
                address = extents[last].address;
                heap_free(extents[last].heap);
                extents[last] = extents[--count];
            }
        )
        PyObject *number = more ? PyLong_FromUnsignedLongLong(address) : NULL;
        if (more && (!number || PyList_Append(taken, number) < 0)) Py_CLEAR(taken);
        Py_XDECREF(number);
    }
    return taken;
}
static PyObject *py_figures(PyObject *module, PyObject *arg) {
    (void)module;
    unsigned long pool = PyLong_AsUnsignedLong(arg);
    if (PyErr_Occurred()) return NULL;
    unsigned long long taken = 0, used = 0;
    UNLOCKED(
        for (size_t i = 0; i < count; i++)
            if (extents[i].pool == pool) {
                taken += extents[i].nbytes;
                used += extents[i].heap->used;
            }
    )
    return Py_BuildValue("KK", taken, used);
}

static PyMethodDef functions[] = {
    {"use", py_use, METH_VARARGS, "use(device, pool, event_fd, extent_nbytes): allocate from a pool from now on"},
    {"make_by", py_make_by, METH_VARARGS,
     "make_by(device, functions, properties, access, naccess, step, limit, keep): make extents by CUDA's functions"},
    {"beside", py_beside, METH_VARARGS,
     "beside(device, nbytes, idle) -> bytes of extents that were made here: note those that the runtime has beside them; "
     "with idle, those without tensors are given back first"},
    {"take", py_take, METH_VARARGS,
     "take(address, keep) -> whether the extent there, which peers may have, was taken away: it is idle, above keep"},
    {"add", py_add, METH_VARARGS, "add(pool, device, address, nbytes): add an extent"},
    {"find", py_find, METH_O, "find(address) -> (pool, device, address, nbytes) of the extent there, or None"},
    {"take_idle", py_take_idle, METH_VARARGS, "take_idle(pool, keep) -> addresses of extents that were taken away"},
    {"figures", py_figures, METH_O, "figures(pool) -> (bytes of all extents, bytes in use)"},
    {NULL, NULL, 0, NULL}};
/* fork(2): no thread may hold the mutex then, as it would stay held in the child. The handlers of the heaps are
 * registered before, so this mutex is taken before their locks, as everywhere here. */
static void before_fork(void) { pthread_mutex_lock(&lock); }
static void after_fork(void) { pthread_mutex_unlock(&lock); }
static int fork_code;
static void register_handlers(void) { fork_code = pthread_atfork(before_fork, after_fork, after_fork); }
static int execute(PyObject *module) {
    (void)module;
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    int code = watch_forks();
    if (!code) {
        pthread_once(&once, register_handlers);
        code = fork_code;
    }
    if (code) { PyErr_NoMemory(); return -1; }
    return 0;
}
static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, execute},
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL}};
static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "zcactor.device._torch",
    .m_doc = "PyTorch's memory in the device store; see the comment in _torch.c.",
    .m_methods = functions,
    .m_slots = slots};
PyMODINIT_FUNC PyInit__torch(void) { return PyModuleDef_Init(&definition); }
