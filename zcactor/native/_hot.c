/* The hot path of a connection, in C: plain frames in and out, credits, and the bytes that wait to be sent.
 *
 * Measured need: after a context switch the interpreter runs with cold caches, and each Python function on the way of a
 * call costs a multiple of what it costs in a loop. What is here is what a call with plain arguments passes through; every
 * other frame takes the Python path beside it (zcactor.rpc.codec, zcactor.rpc.session), which gives the same bytes.
 *
 * What changes credits, releases and the tail of a send buffer together does so without running Python and without letting go
 * of the interpreter lock, so that it is atomic towards the other threads of the process. The sends are non-blocking.
 *
 * The rule: after anything that can run Python, or let go of the interpreter lock, read every field again, and own what is used
 * across it. Python runs in a call or an attribute of any object that is not of an exact built-in type, in the last Py_DECREF of
 * one, in an allocation that the garbage collector tracks, and in the slots' full() and flush(); the lock goes in seal_apply, too.
 * Another thread may have written a frame, taken the releases, or closed the connection meanwhile.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_1_25_API_VERSION
#include <numpy/arrayobject.h>
#include "_living.h"

/* ---------------------------------------------------------------- the frame template; see zcactor/rpc/codec.py */

#define CONSTANT_NBYTES 52
#define HEAD 100          /* bytes of a lean frame before its payload, length prefix included */
#define AT_ID 56
#define AT_EXTRA 64
#define AT_ACTOR 72
#define AT_CODE 76
#define AT_CREDITS 78
#define AT_KIND 80
#define AT_FLAGS 81
#define AT_NREGIONS 84
#define AT_REGIONS 88
#define AT_NPAYLOAD 96    /* without regions and releases */
#define AT_RELEASES_OFFSET 48
#define AT_PAYLOAD_OFFSET 52
#define SHARED_NBYTES 44  /* of the constant: what frames with regions or releases have too */
#define REGION_NBYTES 56
#define RELEASE_NBYTES 16
#define MAX_VALUES 15     /* in one plain frame: what the head of a short MessagePack array counts */
#define MAX_ARRAYS 8      /* of them by reference */
#define MAX_DIMS 8        /* of each */
#define MAX_CODE 31       /* bytes of a dtype's name, which is ASCII */
#define MAX_RELEASES 64
#define EXT_ARRAY 3       /* zcactor.marshal.values.Code.ARRAY */
#define EXT_INLINE_ARRAY 4
#define KIND_CALL 1
#define KIND_RESPONSE 2
#define STATUS_OK 0

static char constant[CONSTANT_NBYTES];
static PyObject *protocol_error, *connection_lost, *state_queued, *state_sent, *str_complete_plain;

#define PUT(T, p, v) do { T put_ = (T)(v); memcpy((p), &put_, sizeof put_); } while (0)
#define GET(T, p) (__extension__({ T get_; memcpy(&get_, (p), sizeof get_); get_; }))

/* ---------------------------------------------------------------- Credits: zcactor.transport.credits.Credits, atomic */

typedef struct { PyObject_HEAD int window, available, owed, threshold; } Credits;

static int credits_init(Credits *self, PyObject *args, PyObject *kwargs) {
    int depth;
    if (kwargs && PyDict_GET_SIZE(kwargs)) { PyErr_SetString(PyExc_TypeError, "Credits takes no keywords"); return -1; }
    if (!PyArg_ParseTuple(args, "i", &depth)) return -1;
    if (depth < 3 || depth > 65535) {
        PyErr_Format(PyExc_ValueError, "receive depth is %d frames; 3 to 65535 are possible", depth);
        return -1;
    }
    self->window = self->available = depth - 2;
    self->owed = 0;
    self->threshold = self->window / 2 + 1;
    return 0;
}
static PyObject *credits_take(Credits *self, PyObject *Py_UNUSED(ignored)) {
    if (self->available <= 0) Py_RETURN_FALSE;
    self->available--;
    Py_RETURN_TRUE;
}
static int credits_do_returned(Credits *self, long count) {
    if (count < 0 || count > self->window - self->available) {
        PyErr_Format(protocol_error, "the peer returned %ld credits, but only %d frames are outstanding", count,
                     self->window - self->available);
        return -1;
    }
    self->available += (int)count;
    return 0;
}
static int credits_do_consumed(Credits *self, long count) {
    if (count < 0 || count > self->window - self->owed) {
        PyErr_Format(protocol_error, "the peer sent a frame beyond its window of %d, none of them acknowledged", self->window);
        return -1;
    }
    self->owed += (int)count;
    return 0;
}
static PyObject *credits_returned(Credits *self, PyObject *arg) {
    long count = PyLong_AsLong(arg);
    if ((count == -1 && PyErr_Occurred()) || credits_do_returned(self, count) < 0) return NULL;
    Py_RETURN_NONE;
}
static PyObject *credits_consumed(Credits *self, PyObject *const *args, Py_ssize_t nargs) {
    long count = nargs ? PyLong_AsLong(args[0]) : 1;
    if ((count == -1 && PyErr_Occurred()) || credits_do_consumed(self, count) < 0) return NULL;
    Py_RETURN_NONE;
}
static PyObject *credits_take_owed(Credits *self, PyObject *Py_UNUSED(ignored)) {
    int owed = self->owed;
    self->owed = 0;
    return PyLong_FromLong(owed);
}
static PyObject *credits_get(Credits *self, void *which) {
    switch ((intptr_t)which) {
    case 0: return PyLong_FromLong(self->window);
    case 1: return PyLong_FromLong(self->available);
    case 2: return PyLong_FromLong(self->owed);
    default: return PyBool_FromLong(self->owed >= self->threshold);
    }
}
static PyMethodDef credits_methods[] = {
    {"take", (PyCFunction)credits_take, METH_NOARGS, "Take the credit for one frame; False when there is none."},
    {"returned", (PyCFunction)credits_returned, METH_O, "The peer consumed that many more of our frames."},
    {"consumed", (PyCFunction)(void (*)(void))credits_consumed, METH_FASTCALL, "That many of the peer's frames were consumed."},
    {"take_owed", (PyCFunction)credits_take_owed, METH_NOARGS, "What to write into the next frame's credits field."},
    {NULL, NULL, 0, NULL}};
static PyGetSetDef credits_getset[] = {
    {"window", (getter)credits_get, NULL, "Frames that may be outstanding in each direction.", (void *)0},
    {"available", (getter)credits_get, NULL, "Frames that may be sent now.", (void *)1},
    {"owed", (getter)credits_get, NULL, "Frames consumed and not yet reported.", (void *)2},
    {"due", (getter)credits_get, NULL, "A CREDIT frame must go now unless another frame does.", (void *)3},
    {NULL, NULL, NULL, NULL, NULL}};
static PyTypeObject CreditsType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "zcactor.native._hot.Credits",
    .tp_basicsize = sizeof(Credits), .tp_flags = Py_TPFLAGS_DEFAULT, .tp_new = PyType_GenericNew,
    .tp_init = (initproc)credits_init, .tp_methods = credits_methods, .tp_getset = credits_getset,
    .tp_doc = "zcactor.transport.credits.Credits, with every operation atomic towards other threads."};

/* ---------------------------------------------------------------- Counters: zcactor.rpc.counters.Counters */

typedef struct {
    PyObject_HEAD
    unsigned long long calls, frames_sent, frames_received, bytes_eager, bytes_mapped, bytes_read, bytes_received,
        bytes_authenticated;
} Counters;

#define COUNTER(name) {#name, T_ULONGLONG, offsetof(Counters, name), 0, NULL}
static PyMemberDef counters_members[] = {
    COUNTER(calls), COUNTER(frames_sent), COUNTER(frames_received), COUNTER(bytes_eager), COUNTER(bytes_mapped),
    COUNTER(bytes_read), COUNTER(bytes_received), COUNTER(bytes_authenticated), {NULL, 0, 0, 0, NULL}};
static PyTypeObject CountersType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "zcactor.native._hot.Counters",
    .tp_basicsize = sizeof(Counters), .tp_flags = Py_TPFLAGS_DEFAULT, .tp_new = PyType_GenericNew,
    .tp_members = counters_members, .tp_doc = "zcactor.rpc.counters.Counters, where the native part counts too."};

/* ---------------------------------------------------------------- sealed records: zcactor.transport.sealing */

#define RECORD_HEAD 4
#define RECORD_TAG 16
#define RECORD_MOST (1 << 20)
#define RECEIVE_MOST (256 << 10)

/* The encrypt or decrypt of an AESGCM with the cipher of libsodium (docs/decisions/0017-sealed-frames.md), by its function's address:
 * crypto_aead_aes256gcm_encrypt or crypto_aead_aes256gcm_decrypt. */
#define RECORD_NONCE 12
#define RECORD_KEY 32
#define CIPHER_ALONE (64 << 10) /* bytes from which on other threads may run meanwhile */
typedef unsigned char byte;
typedef int (*cipher_encrypt)(byte *, unsigned long long *, const byte *, unsigned long long, const byte *, unsigned long long,
                              const byte *, const byte *, const byte *);
typedef int (*cipher_decrypt)(byte *, unsigned long long *, byte *, const byte *, unsigned long long, const byte *,
                              unsigned long long, const byte *, const byte *);
#define CIPHER_ENCRYPT "zcactor.aes256gcm.encrypt" /* names of capsules, with functions of the types above */
#define CIPHER_DECRYPT "zcactor.aes256gcm.decrypt"
typedef struct {
    PyObject_HEAD
    void *function;
    PyObject *invalid; /* decrypts, and raises this for what does not open; NULL: encrypts */
    byte key[RECORD_KEY];
} Cipher;

static int cipher_init(Cipher *self, PyObject *args, PyObject *kwargs) {
    PyObject *address, *invalid = NULL;
    const char *key;
    Py_ssize_t size;
    if (kwargs && PyDict_GET_SIZE(kwargs)) { PyErr_SetString(PyExc_TypeError, "Cipher takes no keywords"); return -1; }
    if (!PyArg_ParseTuple(args, "Oy#|O", &address, &key, &size, &invalid)) return -1;
    if (self->function) { PyErr_SetString(PyExc_RuntimeError, "a Cipher is initialised once"); return -1; }
    if (size != RECORD_KEY) { PyErr_Format(PyExc_ValueError, "a key of %zd bytes; it has %d", size, RECORD_KEY); return -1; }
    void *function = PyCapsule_GetPointer(address, invalid ? CIPHER_DECRYPT : CIPHER_ENCRYPT); /* no number is one */
    if (!function) return -1;
    memcpy(self->key, key, RECORD_KEY);
    self->invalid = Py_XNewRef(invalid);
    self->function = function;
    return 0;
}
static void cipher_dealloc(Cipher *self) {
    explicit_bzero(self->key, RECORD_KEY);
    Py_XDECREF(self->invalid);
    Py_TYPE(self)->tp_free((PyObject *)self);
}
static PyObject *cipher_apply(Cipher *self, const char *nonce, PyObject *text, const char *header, Py_ssize_t head) {
    if (!self->function) return PyErr_Format(PyExc_RuntimeError, "this Cipher was not initialised");
    Py_ssize_t size = PyBytes_GET_SIZE(text) + (self->invalid ? -RECORD_TAG : RECORD_TAG);
    PyObject *made = size < 0 ? NULL : PyBytes_FromStringAndSize(NULL, size);
    if (!made && size >= 0) return NULL;
    int failed = -1;
    if (made) {
        const byte *from = (const byte *)PyBytes_AS_STRING(text), *ad = (const byte *)header, *count = (const byte *)nonce;
        byte *to = (byte *)PyBytes_AS_STRING(made);
        unsigned long long n = (unsigned long long)PyBytes_GET_SIZE(text), written, ad_size = (unsigned long long)head;
        PyThreadState *state = n < CIPHER_ALONE ? NULL : PyEval_SaveThread();
        if (self->invalid) failed = ((cipher_decrypt)self->function)(to, &written, NULL, from, n, ad, ad_size, count, self->key);
        else failed = ((cipher_encrypt)self->function)(to, &written, from, n, ad, ad_size, NULL, count, self->key);
        if (state) PyEval_RestoreThread(state);
    }
    if (!failed) return made;
    Py_XDECREF(made);
    PyErr_SetNone(self->invalid ? self->invalid : PyExc_RuntimeError);
    return NULL;
}
static PyObject *cipher_call(Cipher *self, PyObject *args, PyObject *kwargs) {
    const char *nonce, *header;
    Py_ssize_t size, head;
    PyObject *text;
    if (kwargs && PyDict_GET_SIZE(kwargs)) return PyErr_Format(PyExc_TypeError, "a Cipher takes no keywords");
    if (!PyArg_ParseTuple(args, "y#Sy#", &nonce, &size, &text, &header, &head)) return NULL;
    if (size != RECORD_NONCE) return PyErr_Format(PyExc_ValueError, "a nonce of %zd bytes; it has %d", size, RECORD_NONCE);
    return cipher_apply(self, nonce, text, header, head);
}
static PyTypeObject CipherType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "zcactor.native._hot.Cipher",
    .tp_basicsize = sizeof(Cipher), .tp_flags = Py_TPFLAGS_DEFAULT, .tp_new = PyType_GenericNew,
    .tp_init = (initproc)cipher_init, .tp_dealloc = (destructor)cipher_dealloc, .tp_call = (ternaryfunc)cipher_call,
    .tp_doc = "One direction of AES-256-GCM by libsodium: Cipher(capsule with its function, key) encrypts, and with what is raised for "
              "what does not open as a third argument it decrypts. Called with (nonce, text, authenticated); all are bytes."};

/* What `apply`, a Cipher or the encrypt or decrypt of an AESGCM, makes of `text` in the record number *count, whose plain text has
 * `nbytes`. It may let other threads run; `text` is a bytes object, so that nobody writes to it meanwhile. */
static PyObject *seal_apply(PyObject *apply, uint64_t *count, PyObject *text, uint32_t nbytes) {
    char nonce[RECORD_NONCE] = {0}, header[RECORD_HEAD];
    PUT(uint64_t, nonce + 4, *count);
    PUT(uint32_t, header, nbytes);
    if (Py_TYPE(apply) == &CipherType) {
        ++*count; /* whatever comes of it: no nonce is used twice */
        return cipher_apply((Cipher *)apply, nonce, text, header, RECORD_HEAD);
    }
    PyObject *stack[4] = {NULL, PyBytes_FromStringAndSize(nonce, sizeof nonce), text, PyBytes_FromStringAndSize(header, RECORD_HEAD)};
    PyObject *result = NULL;
    if (stack[1] && stack[3]) {
        ++*count;
        result = PyObject_Vectorcall(apply, stack + 1, 3 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    }
    Py_XDECREF(stack[1]);
    Py_XDECREF(stack[3]);
    if (result && !PyBytes_Check(result)) {
        Py_CLEAR(result);
        PyErr_SetString(PyExc_TypeError, "sealing gives bytes");
    }
    return result;
}

/* ---------------------------------------------------------------- SendBuffer: zcactor.transport.sendbuffer, on a socket, where
 * what is sent at once may become a sealed record; or on the slots of a zcactor.transport.verbs.sending.SlotSender, whose memory
 * it writes to and whose Python does the rest */

typedef struct {
    PyObject_HEAD
    int fd, blocked, on_slots, closed;
    Py_ssize_t max_reserve, head, tail, room;
    char *data;
    Py_buffer slot;              /* on slots: what `data` lies in, exported for as long as it is written to; obj NULL: none */
    PyObject *scratch, *refused; /* a bytearray that Python encodes into; why nothing more is accepted, or NULL */
    PyObject *slots;             /* on slots and not closed: full() gives a new slot, flush() sends this one */
    PyObject *encrypt, *record;  /* on a socket: seals, or NULL; what it made last, while not all of that is sent, without header */
    uint64_t count;              /* records so far */
    Py_ssize_t sent;             /* bytes of the record with its header */
    int sealing;                 /* a thread is at it, and will send what the others write meanwhile */
} SendBuffer;
static PyObject *str_full, *str_flush;

static int buffer_traverse(SendBuffer *self, visitproc visit, void *arg) {
    /* Not the slot: until Python 3.12 a memoryview that is cleared while it is exported crashes. It leads to no cycle. */
    Py_VISIT(self->slots);
    Py_VISIT(self->encrypt);
    Py_VISIT(self->refused);
    return 0;
}
/* Nothing is written to the slot any more. */
static void buffer_leave_slot(SendBuffer *self) {
    Py_buffer left = self->slot;
    memset(&self->slot, 0, sizeof self->slot);
    if (left.obj) PyBuffer_Release(&left);
}
static int buffer_clear(SendBuffer *self) {
    self->closed = self->blocked = 1;
    self->head = self->tail = 0;
    if (self->on_slots) { self->data = NULL; self->room = 0; }
    buffer_leave_slot(self);
    Py_CLEAR(self->slots);
    Py_CLEAR(self->encrypt);
    return 0;
}
static void buffer_dealloc(SendBuffer *self) {
    PyObject_GC_UnTrack(self);
    buffer_clear(self);
    if (!self->on_slots) PyMem_Free(self->data);
    Py_XDECREF(self->record);
    Py_XDECREF(self->scratch);
    Py_XDECREF(self->refused);
    Py_TYPE(self)->tp_free((PyObject *)self);
}
static PyObject *buffer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    Py_ssize_t max_reserve;
    int fd;
    PyObject *slots = NULL, *encrypt = NULL;
    unsigned long long count = 0;
    if (kwargs && PyDict_GET_SIZE(kwargs)) return PyErr_Format(PyExc_TypeError, "SendBuffer takes no keywords");
    if (!PyArg_ParseTuple(args, "ni|OOK", &max_reserve, &fd, &slots, &encrypt, &count)) return NULL;
    SendBuffer *self = (SendBuffer *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->max_reserve = max_reserve;
    self->fd = fd;
    if (slots != Py_None) self->slots = Py_XNewRef(slots);
    self->encrypt = Py_XNewRef(encrypt);
    self->count = count;
    self->on_slots = self->slots != NULL;
    if (!self->on_slots) {
        self->room = 4096;
        self->data = PyMem_Malloc((size_t)self->room);
    }
    self->scratch = PyByteArray_FromStringAndSize(NULL, max_reserve);
    if (self->scratch && (self->data || self->on_slots)) return (PyObject *)self;
    if (!PyErr_Occurred()) PyErr_NoMemory();
    Py_DECREF(self);
    return NULL;
}
/* Room for n bytes at the tail: NULL with an exception. On slots it may run Python. */
static char *buffer_room(SendBuffer *self, Py_ssize_t n) {
    if (self->on_slots) {
        while (n > self->room - self->tail) { /* once, unless another thread fills the new slot meanwhile */
            PyObject *slots = Py_XNewRef(self->slots), *done;
            if (!slots) {
                PyErr_SetObject(connection_lost, self->refused);
                return NULL;
            }
            done = n > self->max_reserve ? PyErr_Format(PyExc_ValueError, "a frame of %zd bytes", n)
                                         : PyObject_CallMethodNoArgs(slots, str_full);
            Py_DECREF(slots);
            if (!done) return NULL;
            Py_DECREF(done);
        }
        return self->data + self->tail;
    }
    if (self->tail + n > self->room) {
        if (self->head) {
            memmove(self->data, self->data + self->head, (size_t)(self->tail - self->head));
            self->tail -= self->head;
            self->head = 0;
        }
        if (self->tail + n > self->room) {
            Py_ssize_t room = self->room;
            while (self->tail + n > room) room *= 2;
            char *data = PyMem_Realloc(self->data, (size_t)room);
            if (!data) { PyErr_NoMemory(); return NULL; }
            self->data = data;
            self->room = room;
        }
    }
    return self->data + self->tail;
}
static PyObject *buffer_reserve(SendBuffer *self, PyObject *arg) {
    Py_ssize_t n = PyLong_AsSsize_t(arg);
    if (n == -1 && PyErr_Occurred()) return NULL;
    if (n > self->max_reserve)
        return PyErr_Format(PyExc_ValueError,
                            "a frame of %zd bytes with its prefix is too large: the limit is %zd; pass large values by reference",
                            n, self->max_reserve);
    if (self->refused) { PyErr_SetObject(connection_lost, self->refused); return NULL; }
    return Py_BuildValue("Oi", self->scratch, 0);
}
static PyObject *buffer_commit(SendBuffer *self, PyObject *arg) {
    Py_ssize_t n = PyLong_AsSsize_t(arg);
    if (n == -1 && PyErr_Occurred()) return NULL;
    if (n < 0 || n > PyByteArray_GET_SIZE(self->scratch)) return PyErr_Format(PyExc_ValueError, "commit of %zd bytes", n);
    char *to = buffer_room(self, n); /* where the caller's lock keeps other writers from the scratch meanwhile */
    if (!to) return NULL;
    if (self->closed) { PyErr_SetObject(connection_lost, self->refused); return NULL; }
    memcpy(to, PyByteArray_AS_STRING(self->scratch), (size_t)n);
    self->tail += n;
    Py_RETURN_NONE;
}
/* The next record: 0 made, or the buffer was closed meanwhile; -1 with an exception. Other threads may write meanwhile. */
static int buffer_seal(SendBuffer *self) {
    Py_ssize_t n = self->tail - self->head;
    if (n > RECORD_MOST) n = RECORD_MOST;
    PyObject *plain = PyBytes_FromStringAndSize(self->data + self->head, n);
    if (!plain) return -1;
    self->head += n;
    if (self->head == self->tail) self->head = self->tail = 0;
    PyObject *record = seal_apply(self->encrypt, &self->count, plain, (uint32_t)n);
    Py_DECREF(plain);
    if (!record) return -1;
    if (self->closed) Py_DECREF(record);
    else self->record = record;
    self->sent = 0;
    return 0;
}
/* The system took nothing: 0 try again, 1 the socket is full, -1 an exception is set. */
static int send_refused(void) {
    if (errno == EINTR) return 0;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return 1;
    PyErr_SetFromErrno(PyExc_OSError);
    return -1;
}
/* Send what is left of the record: 0 all gone, 1 the socket is full, -1 an exception is set. */
static int buffer_send_record(SendBuffer *self) {
    int refused;
    Py_ssize_t size = PyBytes_GET_SIZE(self->record);
    char header[RECORD_HEAD];
    PUT(uint32_t, header, size - RECORD_TAG);
    while (self->sent < size + RECORD_HEAD) {
        Py_ssize_t at = self->sent < RECORD_HEAD ? 0 : self->sent - RECORD_HEAD, led = self->sent < RECORD_HEAD ? self->sent : RECORD_HEAD;
        struct iovec parts[2] = {{header + led, (size_t)(RECORD_HEAD - led)},
                                 {PyBytes_AS_STRING(self->record) + at, (size_t)(size - at)}};
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
        ssize_t sent = sendmsg(self->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent >= 0) self->sent += sent;
        else if ((refused = send_refused()) != 0) return refused;
    }
    Py_CLEAR(self->record);
    return 0;
}
static int buffer_drain_sealed(SendBuffer *self) {
    if (self->sealing) return 0;
    self->sealing = 1;
    int left = 0;
    while (left == 0 && !self->closed && (self->record || self->head < self->tail)) {
        if (!self->record) left = buffer_seal(self);
        if (left == 0 && self->record) left = buffer_send_record(self);
    }
    self->sealing = 0;
    return left;
}
/* Send what is there: 0 all gone, 1 the socket is full, -1 an exception is set. */
static int buffer_drain(SendBuffer *self) {
    int refused;
    if (self->encrypt) return buffer_drain_sealed(self);
    if (self->on_slots) {
        PyObject *slots = Py_XNewRef(self->slots), *done = slots ? PyObject_CallMethodNoArgs(slots, str_flush) : Py_NewRef(Py_None);
        Py_XDECREF(slots);
        Py_XDECREF(done);
        return done ? 0 : -1;
    }
    while (!self->closed && self->head < self->tail) {
        ssize_t sent = send(self->fd, self->data + self->head, (size_t)(self->tail - self->head), MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent >= 0) self->head += sent;
        else if ((refused = send_refused()) != 0) return refused;
    }
    self->head = self->tail = 0;
    return 0;
}
/* The same, and whether the socket is full is noted, unless the buffer was closed meanwhile. */
static int buffer_send(SendBuffer *self) {
    int left = buffer_drain(self);
    if (left >= 0 && !self->closed) self->blocked = left;
    return self->closed && left > 0 ? 0 : left;
}
/* 1 when there is nothing to send, or it goes on by itself when the socket takes more. */
static int buffer_idle(SendBuffer *self) { return self->blocked || (self->head == self->tail && !self->record); }
static PyObject *buffer_flush(SendBuffer *self, PyObject *Py_UNUSED(ignored)) {
    if (buffer_idle(self)) Py_RETURN_FALSE;
    int left = buffer_send(self);
    return left < 0 ? NULL : PyBool_FromLong(left);
}
static PyObject *buffer_resume(SendBuffer *self, PyObject *Py_UNUSED(ignored)) {
    int left = self->closed ? 0 : buffer_send(self);
    return left < 0 ? NULL : PyBool_FromLong(!left);
}
static PyObject *buffer_refuse(SendBuffer *self, PyObject *why) {
    if (!self->refused) self->refused = Py_NewRef(why);
    Py_RETURN_NONE;
}
static PyObject *buffer_close(SendBuffer *self, PyObject *why) {
    if (!self->refused) self->refused = Py_NewRef(why);
    self->head = self->tail = 0;
    self->closed = self->blocked = 1;
    self->fd = -1; /* nobody must send to whoever has the number next: neither a thread that is sealing now */
    if (self->on_slots) { self->data = NULL; self->room = 0; }
    Py_CLEAR(self->record);
    buffer_leave_slot(self);
    Py_CLEAR(self->slots); /* which leads back here */
    Py_RETURN_NONE;
}
/* swap(view, tail): write to another slot from now on, from `tail`; where the frames in the former one end. */
static PyObject *buffer_swap(SendBuffer *self, PyObject *const *args, Py_ssize_t nargs) {
    Py_buffer view;
    Py_ssize_t tail = nargs == 2 ? PyLong_AsSsize_t(args[1]) : -1;
    if (tail < 0 || !self->on_slots) return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "swap(view, tail)");
    if (PyObject_GetBuffer(args[0], &view, PyBUF_WRITABLE) < 0) return NULL;
    if (self->closed || tail > view.len) { /* closed: there are no frames in the former slot, and none will be in this one */
        PyBuffer_Release(&view);
        return self->closed ? PyLong_FromLong(0)
                            : PyErr_Format(PyExc_ValueError, "frames from byte %zd on in a slot of %zd bytes", tail, view.len);
    }
    Py_ssize_t end = self->tail;
    Py_buffer left = self->slot;
    self->slot = view;
    self->data = view.buf;
    self->room = view.len;
    self->head = self->tail = tail;
    if (left.obj) PyBuffer_Release(&left);
    return PyLong_FromSsize_t(end);
}
static PyObject *buffer_pending(SendBuffer *self, void *Py_UNUSED(closure)) {
    return PyLong_FromSsize_t(self->tail - self->head + (self->record || self->sealing)); /* of what is sealed only that it is there */
}
static PyMethodDef buffer_methods[] = {
    {"reserve", (PyCFunction)buffer_reserve, METH_O, "Room for one frame: a buffer and the offset in it."},
    {"commit", (PyCFunction)buffer_commit, METH_O, "The first bytes of the last reservation are to be sent."},
    {"flush", (PyCFunction)buffer_flush, METH_NOARGS, "Send what is committed; True when the socket is full from now on."},
    {"resume", (PyCFunction)buffer_resume, METH_NOARGS, "Go on sending; True when nothing is left."},
    {"refuse", (PyCFunction)buffer_refuse, METH_O, "Accept nothing more, and say why."},
    {"close", (PyCFunction)buffer_close, METH_O, "Accept nothing more and drop what was not sent."},
    {"swap", (PyCFunction)(void (*)(void))buffer_swap, METH_FASTCALL, "Write to another slot; where the frames in this one end."},
    {NULL, NULL, 0, NULL}};
static PyGetSetDef buffer_getset[] = {
    {"pending", (getter)buffer_pending, NULL, "Bytes committed and not sent.", NULL}, {NULL, NULL, NULL, NULL, NULL}};
static PyTypeObject SendBufferType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "zcactor.native._hot.SendBuffer",
    .tp_basicsize = sizeof(SendBuffer), .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, .tp_new = buffer_new,
    .tp_dealloc = (destructor)buffer_dealloc, .tp_traverse = (traverseproc)buffer_traverse, .tp_clear = (inquiry)buffer_clear,
    .tp_methods = buffer_methods, .tp_getset = buffer_getset, .tp_doc = "zcactor.transport.sendbuffer.SendBuffer for a socket: SendBuffer(max_reserve, fd); on slots: "
              "SendBuffer(max_reserve, -1, slots); sealed: SendBuffer(max_reserve, fd, None, encrypt, records made before)."};

/* ---------------------------------------------------------------- plain values as MessagePack */

/* Bytes that `value` takes, or -1 when it is not plain (no exception is set). */
static Py_ssize_t plain_size(PyObject *value) {
    PyTypeObject *type = Py_TYPE(value);
    if (type == &PyLong_Type || type == &PyFloat_Type) return 9;
    if (value == Py_None || type == &PyBool_Type) return 1;
    if (type == &PyUnicode_Type) {
        Py_ssize_t n;
        if (PyUnicode_IS_COMPACT_ASCII(value)) return PyUnicode_GET_LENGTH(value) + 5;
        if (!PyUnicode_AsUTF8AndSize(value, &n)) { PyErr_Clear(); return -1; } /* a lone surrogate: pickle has it */
        return n + 5;
    }
    if (type == &PyBytes_Type) return PyBytes_GET_SIZE(value) + 5;
    return -1;
}
static char *put_big(char *p, unsigned char head, uint64_t v, int nbytes) {
    *p++ = (char)head;
    for (int shift = 8 * (nbytes - 1); shift >= 0; shift -= 8) *p++ = (char)(v >> shift);
    return p;
}
static char *put_sized(char *p, const char *from, Py_ssize_t n, int h8, int h16, int h32) {
    if (n < 256 && h8) p = put_big(p, (unsigned char)h8, (uint64_t)n, 1);
    else if (n < 65536) p = put_big(p, (unsigned char)h16, (uint64_t)n, 2);
    else p = put_big(p, (unsigned char)h32, (uint64_t)n, 4);
    memcpy(p, from, (size_t)n);
    return p + n;
}
/* Write a value that plain_size has accepted; NULL when an int does not fit 64 bits (no exception is set). */
static char *put_plain(char *p, PyObject *value) {
    PyTypeObject *type = Py_TYPE(value);
    if (type == &PyLong_Type) {
        int overflow;
        long long v = PyLong_AsLongLongAndOverflow(value, &overflow);
        if (overflow > 0) {
            unsigned long long u = PyLong_AsUnsignedLongLong(value);
            if (u == (unsigned long long)-1 && PyErr_Occurred()) { PyErr_Clear(); return NULL; }
            return put_big(p, 0xcf, u, 8);
        }
        if (overflow) return NULL;
        if (v >= 0) {
            if (v < 128) { *p++ = (char)v; return p; }
            if (v < 256) return put_big(p, 0xcc, (uint64_t)v, 1);
            if (v < 65536) return put_big(p, 0xcd, (uint64_t)v, 2);
            if (v <= UINT32_MAX) return put_big(p, 0xce, (uint64_t)v, 4);
            return put_big(p, 0xcf, (uint64_t)v, 8);
        }
        if (v >= -32) { *p++ = (char)v; return p; }
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
    if (value == Py_None) { *p++ = (char)0xc0; return p; }
    if (type == &PyBool_Type) { *p++ = (char)(value == Py_True ? 0xc3 : 0xc2); return p; }
    if (type == &PyUnicode_Type) {
        Py_ssize_t n;
        const char *s = PyUnicode_AsUTF8AndSize(value, &n);
        if (!s) { PyErr_Clear(); return NULL; }
        if (n < 32) { *p++ = (char)(0xa0 | n); memcpy(p, s, (size_t)n); return p + n; }
        return put_sized(p, s, n, 0xd9, 0xda, 0xdb);
    }
    return put_sized(p, PyBytes_AS_STRING(value), PyBytes_GET_SIZE(value), 0xc4, 0xc5, 0xc6);
}
static uint64_t get_big(const unsigned char *p, int nbytes) {
    uint64_t v = 0;
    while (nbytes--) v = v << 8 | *p++;
    return v;
}
/* Read one plain value and move *at on. NULL without an exception: it is not plain, or malformed; Python will judge. */
static PyObject *get_plain(const unsigned char **at, const unsigned char *end) {
    const unsigned char *p = *at;
    if (p >= end) return NULL;
    unsigned char head = *p++;
    Py_ssize_t left = end - p, n;
    int text = 1;
#define NEED(k) if (left < (k)) return NULL
    if (head < 0x80) { *at = p; return PyLong_FromLong(head); }
    if (head >= 0xe0) { *at = p; return PyLong_FromLong((signed char)head); }
    if ((head & 0xe0) == 0xa0) { n = head & 0x1f; goto sized; }
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
    case 0xcc: NEED(1); *at = p + 1; return PyLong_FromLong(p[0]);
    case 0xcd: NEED(2); *at = p + 2; return PyLong_FromLong((long)get_big(p, 2));
    case 0xce: NEED(4); *at = p + 4; return PyLong_FromUnsignedLong((unsigned long)get_big(p, 4));
    case 0xcf: NEED(8); *at = p + 8; return PyLong_FromUnsignedLongLong(get_big(p, 8));
    case 0xd0: NEED(1); *at = p + 1; return PyLong_FromLong((int8_t)p[0]);
    case 0xd1: NEED(2); *at = p + 2; return PyLong_FromLong((int16_t)get_big(p, 2));
    case 0xd2: NEED(4); *at = p + 4; return PyLong_FromLong((int32_t)get_big(p, 4));
    case 0xd3: NEED(8); *at = p + 8; return PyLong_FromLongLong((int64_t)get_big(p, 8));
    case 0xc4: text = 0; /* fall through */
    case 0xd9: NEED(1); n = (Py_ssize_t)get_big(p, 1); p += 1; break;
    case 0xc5: text = 0; /* fall through */
    case 0xda: NEED(2); n = (Py_ssize_t)get_big(p, 2); p += 2; break;
    case 0xc6: text = 0; /* fall through */
    case 0xdb: NEED(4); n = (Py_ssize_t)get_big(p, 4); p += 4; break;
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

/* ---------------------------------------------------------------- Wire: one session's plain frames */

/* What Python gives a Wire, in the order of its arguments; see zcactor.rpc.session. */
enum { LEASES, PENDING, OPEN, BACKLOG, HOSTS, SESSION, MAKE_LEASE, ON_CALL, ON_OTHER, ON_BATCH, ON_BLOCKED, ON_BROKEN,
       SCHEDULE_FLUSH, SHARE, BLOCK_TYPE, STORE, CODES, DTYPES, NGIVEN };
static const char *const given_names[NGIVEN] = {
    "leases", "pending", "open", "backlog", "hosts", "session", "make_lease", "on_call", "on_other", "on_batch", "on_blocked",
    "on_broken", "schedule_flush", "share", "block_type", "store", "codes", "dtypes"};
#define ANSWERS_PER_FLUSH 64 /* answers to one batch that share a system call: with more the caller would idle meanwhile */

typedef struct {
    PyObject_HEAD
    SendBuffer *out;
    Credits *credits;
    Counters *counters;
    char process[16], peer[16];
    Py_ssize_t eager_limit, max_frame;
    uint64_t arena_nbytes, next_id;
    PyObject *given[NGIVEN];
    uint64_t *released; /* leases to give back with the next frame */
    Py_ssize_t nreleased, released_room;
    unsigned long thread; /* the loop's */
    int feeding, unflushed; /* a batch is being taken in; answers to it that have not been sent */
    char flush_scheduled;
} Wire;

static PyObject *str_grant, *str_withdraw, *str_release, *str_store, *str_sealed, *str_exported, *str_id, *str_offset, *str_address, *str_session, *str_state,
    *str_receive_plain;

static int wire_traverse(Wire *self, visitproc visit, void *arg) {
    for (int i = 0; i < NGIVEN; i++) Py_VISIT(self->given[i]);
    Py_VISIT(self->out);
    return 0;
}
static int wire_clear(Wire *self) {
    for (int i = 0; i < NGIVEN; i++) Py_CLEAR(self->given[i]);
    Py_CLEAR(self->out);
    return 0;
}
static void wire_dealloc(Wire *self) {
    PyObject_GC_UnTrack(self);
    wire_clear(self);
    Py_XDECREF(self->credits);
    Py_XDECREF(self->counters);
    PyMem_Free(self->released);
    Py_TYPE(self)->tp_free((PyObject *)self);
}
static PyObject *wire_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *process, *peer, *out, *credits, *counters, *given;
    unsigned long long arena;
    Py_ssize_t eager_limit, max_frame;
    static char *names[] = {"out", "credits", "counters", "process", "peer", "eager_limit", "max_frame", "arena_nbytes", "given", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!O!SSnnKO!", names, &SendBufferType, &out, &CreditsType, &credits,
                                     &CountersType, &counters, &process, &peer, &eager_limit, &max_frame, &arena, &PyDict_Type,
                                     &given))
        return NULL;
    if (PyBytes_GET_SIZE(process) != 16 || PyBytes_GET_SIZE(peer) != 16)
        return PyErr_Format(PyExc_ValueError, "a process's name has 16 bytes");
    if (PyDict_GET_SIZE(given) != NGIVEN) return PyErr_Format(PyExc_TypeError, "Wire needs %d things and nothing else", NGIVEN);
    Wire *self = (Wire *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    for (int i = 0; i < NGIVEN; i++) {
        PyObject *value = PyDict_GetItemString(given, given_names[i]);
        int is_dict = i == PENDING || i == OPEN || i == HOSTS || i == CODES || i == DTYPES;
        if (!value || (is_dict && !PyDict_Check(value))) {
            PyErr_Format(PyExc_TypeError, "Wire needs %s%s", given_names[i], value ? " as a dict" : "");
            Py_DECREF(self);
            return NULL;
        }
        self->given[i] = Py_NewRef(value);
    }
    self->out = (SendBuffer *)Py_NewRef(out);
    self->credits = (Credits *)Py_NewRef(credits);
    self->counters = (Counters *)Py_NewRef(counters);
    self->eager_limit = eager_limit;
    self->max_frame = max_frame;
    self->arena_nbytes = arena;
    self->thread = PyThread_get_thread_ident();
    memcpy(self->process, PyBytes_AS_STRING(process), 16);
    memcpy(self->peer, PyBytes_AS_STRING(peer), 16);
    return (PyObject *)self;
}
/* Whether `self` is whole; else an exception is set. The garbage collector may have taken its parts in a cycle. */
static int wire_is_whole(const Wire *self) {
    if (self->out) return 1;
    PyErr_SetString(PyExc_RuntimeError, "this Wire is being collected");
    return 0;
}

/* ---- writing */

typedef struct { /* an array among the values, as it was when it was looked at; the references are ours */
    PyObject *code;       /* of its dtype */
    PyArray_Descr *descr;
    const char *data;
    Py_ssize_t nbytes;
    PyObject *block;      /* that it goes by reference to; NULL: it rides in the frame */
    uint64_t id, offset;
} Laid;

enum { PYTHON = 0, WRITTEN = 1, GONE = 2 }; /* what became of a frame; -1: an exception */

typedef struct { /* a plain frame that is being made */
    int kind, flags, array;  /* KIND_...; whether the payload is the array of the values, or the only one */
    uint32_t actor;
    uint64_t code, id, extra;
    PyObject *const *values;
    Py_ssize_t count;
    PyObject *table, *key;   /* the entry that must still be there when the frame is written; table NULL: none */
    PyObject *call;          /* KIND_CALL: that entry, whose state it becomes; KIND_RESPONSE: the entry goes with it */
    Laid laid[MAX_VALUES];   /* of `values`; only those of arrays are filled in */
    int filled[MAX_VALUES], nfilled, nreferences, ngranted;
    Py_ssize_t most;         /* bytes of payload */
    Py_ssize_t payload;      /* the same, once it is written */
} Frame;

static int get_u64(PyObject *object, PyObject *name, uint64_t *value) {
    PyObject *number = PyObject_GetAttr(object, name);
    if (!number) return -1;
    *value = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    return PyErr_Occurred() ? -1 : 0;
}
/* Whether an attribute is that very object; -1 with an exception. */
static int is_attr(PyObject *object, PyObject *name, PyObject *wanted) {
    PyObject *value = PyObject_GetAttr(object, name);
    if (!value) return -1;
    int is = value == wanted;
    Py_DECREF(value);
    return is;
}
/* Whether a block is of our store, sealed and exported; -1 with an exception. */
static int is_shared(Wire *self, PyObject *block) {
    int is = is_attr(block, str_store, self->given[STORE]);
    if (is > 0) is = is_attr(block, str_sealed, Py_True);
    if (is > 0) is = is_attr(block, str_exported, Py_True);
    return is;
}
/* The reference to an array of our store: 1 done, 0 Python must look at it, -1 an exception. */
static int refer(Wire *self, PyArrayObject *array, Laid *laid) {
    PyObject *root = PyArray_BASE(array), *block = NULL;
    while (root && PyArray_Check(root)) root = PyArray_BASE((PyArrayObject *)root);
    if (root && (PyObject *)Py_TYPE(root) != self->given[BLOCK_TYPE]) return 0;
    if (root && !PyArray_ISWRITEABLE(array)) {
        Py_INCREF(root);
        int shared = is_shared(self, root);
        if (shared > 0) block = root;
        else Py_DECREF(root);
        if (shared < 0) return -1;
    }
    if (!block && !(block = PyObject_CallFunction(self->given[SHARE], "OKn", array, (unsigned long long)(uintptr_t)PyArray_DATA(array),
                                                  (Py_ssize_t)PyArray_NBYTES(array))))
        return -1;
    uint64_t address;
    if (block == Py_None || get_u64(block, str_id, &laid->id) < 0 || get_u64(block, str_offset, &laid->offset) < 0 ||
        get_u64(block, str_address, &address) < 0) {
        Py_DECREF(block);
        return PyErr_Occurred() ? -1 : 0;
    }
    laid->offset += (uint64_t)(uintptr_t)laid->data - address; /* as it was asked about: `is_as_laid` looks whether it is that still */
    laid->block = block;
    return 1;
}
#define ARRAY_MOST (4 + 2 + 1 + MAX_CODE + 1 + MAX_DIMS * 9 + 1) /* bytes of an array's extension beside its elements */
#define MAX_INLINE 60000 /* bytes of an array within the frame: its extension's length has 16 bits */

/* Look at an array and own what its frame will need: 1 done, 0 Python must look at it, -1 an exception. It rides in the frame when
 * zcactor.marshal.marshaller.Packing._inline would write it there, too. */
static int lay(Wire *self, Frame *frame, Py_ssize_t index, PyArrayObject *array) {
    Laid *laid = frame->laid + index;
    memset(laid, 0, sizeof *laid);
    frame->filled[frame->nfilled++] = (int)index;
    laid->descr = (PyArray_Descr *)Py_NewRef(PyArray_DESCR(array));
    laid->data = PyArray_DATA(array);
    laid->nbytes = PyArray_NBYTES(array);
    PyObject *code = PyDict_GetItemWithError(self->given[CODES], (PyObject *)laid->descr);
    if (!code || !PyUnicode_CheckExact(code) || !PyUnicode_IS_COMPACT_ASCII(code) || PyUnicode_GET_LENGTH(code) > MAX_CODE)
        return PyErr_Occurred() ? -1 : 0;
    laid->code = Py_NewRef(code);
    if (!PyArray_IS_C_CONTIGUOUS(array) || PyArray_NDIM(array) > MAX_DIMS) return 0;
    frame->most += ARRAY_MOST;
    if (laid->nbytes < self->eager_limit) {
        frame->most += 5 + laid->nbytes;
        return laid->nbytes <= MAX_INLINE;
    }
    if (frame->nreferences == MAX_ARRAYS) return 0;
    frame->nreferences++;
    return refer(self, array, laid);
}
static int is_as_laid(const Laid *laid, PyArrayObject *array) {
    return PyArray_DESCR(array) == laid->descr && PyArray_DATA(array) == laid->data && PyArray_NBYTES(array) == laid->nbytes &&
           PyArray_IS_C_CONTIGUOUS(array) && PyArray_NDIM(array) <= MAX_DIMS;
}
static char *put_shape(char *p, PyArrayObject *array) {
    *p++ = (char)(0x90 | PyArray_NDIM(array));
    for (int i = 0; i < PyArray_NDIM(array); i++) p = put_big(p, 0xcf, (uint64_t)PyArray_DIM(array, i), 8);
    return p;
}
static char *put_array(char *p, const Laid *laid, PyArrayObject *array, int index) {
    char *head = p;
    p += 3;
    *p++ = (char)0x93;
    *p++ = (char)index;
    p = put_shape(put_plain(p, laid->code), array);
    head[0] = (char)0xc7;
    head[1] = (char)(p - head - 3);
    head[2] = EXT_ARRAY;
    return p;
}
static char *put_inline(char *p, const Laid *laid, PyArrayObject *array) {
    char *head = p;
    p += 4;
    *p++ = (char)0x94;
    p = put_sized(p, laid->data, laid->nbytes, 0xc4, 0xc5, 0xc6);
    p = put_shape(put_plain(p, laid->code), array);
    *p++ = (char)0xc2; /* read-only where it arrives */
    put_big(head, 0xc8, (uint64_t)(p - head - 4), 2);
    head[3] = EXT_INLINE_ARRAY;
    return p;
}
/* What stands before the payload, with the first `nreleases` releases. */
static void put_head(Wire *self, const Frame *frame, char *at, Py_ssize_t head, Py_ssize_t size, int nreleases) {
    int nregions = frame->nreferences;
    memset(at, 0, (size_t)head);
    PUT(uint32_t, at, size - 4);
    memcpy(at + 4, constant, CONSTANT_NBYTES);
    PUT(uint32_t, at + AT_RELEASES_OFFSET, 44 + REGION_NBYTES * nregions);
    PUT(uint32_t, at + AT_PAYLOAD_OFFSET, 44 + REGION_NBYTES * nregions + RELEASE_NBYTES * nreleases);
    PUT(uint64_t, at + AT_ID, frame->id);
    PUT(uint32_t, at + AT_ACTOR, frame->actor);
    PUT(uint16_t, at + AT_CODE, frame->code);
    PUT(uint16_t, at + AT_CREDITS, self->credits->owed);
    PUT(uint64_t, at + AT_EXTRA, frame->extra);
    at[AT_KIND] = (char)frame->kind;
    at[AT_FLAGS] = (char)frame->flags;
    PUT(uint32_t, at + AT_NREGIONS, nregions);
    char *q = at + AT_REGIONS;
    for (int i = 0; i < frame->nfilled; i++) {
        const Laid *laid = frame->laid + frame->filled[i];
        if (!laid->block) continue;
        memcpy(q, self->process, 16);
        PUT(uint64_t, q + 16, laid->id);
        PUT(uint64_t, q + 24, laid->offset);
        PUT(uint64_t, q + 32, laid->nbytes);
        q += REGION_NBYTES;
    }
    PUT(uint32_t, q + 4, nreleases);
    q += 8;
    for (int i = 0; i < nreleases; i++, q += RELEASE_NBYTES) {
        PUT(uint64_t, q, self->released[i]);
        PUT(uint32_t, q + 8, 1);
    }
    PUT(uint32_t, q, frame->payload);
}
/* 1 when frames wait for a credit: nothing may overtake them; -1 with an exception. */
static int has_backlog(Wire *self) {
    Py_ssize_t n = PyObject_Size(self->given[BACKLOG]);
    return n < 0 ? -1 : n > 0;
}
/* Look at the values and lease those that go by reference to the peer: 1 done, 0 Python must write the frame, -1 an exception. */
static int prepare_frame(Wire *self, Frame *frame) {
    if (frame->count > MAX_VALUES) return 0;
    frame->most = 1;
    for (Py_ssize_t i = 0; i < frame->count; i++) {
        if (PyArray_CheckExact(frame->values[i])) {
            int laid = lay(self, frame, i, (PyArrayObject *)frame->values[i]);
            if (laid <= 0) return laid;
            continue;
        }
        Py_ssize_t n = plain_size(frame->values[i]);
        if (n < 0) return 0;
        frame->most += n;
    }
    if (frame->most > self->eager_limit) return 0;
    /* Before the frame can be sent, by whichever thread, so that none is missing when the peer has it and gives it back. */
    for (; frame->ngranted < frame->nfilled; frame->ngranted++) {
        const Laid *laid = frame->laid + frame->filled[frame->ngranted];
        if (!laid->block) continue;
        PyObject *number = PyLong_FromUnsignedLongLong(laid->id);
        PyObject *granted = number ? PyObject_CallMethodObjArgs(self->given[LEASES], str_grant, number, laid->block, NULL) : NULL;
        Py_XDECREF(number);
        if (!granted) return -1;
        Py_DECREF(granted);
    }
    return 1;
}
/* Room for the frame with up to `nreleases`; on slots it may run Python. 1 there is, 0 Python must write it, -1 an exception. */
static int frame_room(Wire *self, Py_ssize_t nbytes) {
    SendBuffer *out = self->out;
    if (nbytes > out->max_reserve) return 0;
    if (buffer_room(out, nbytes)) return 1;
    if (!out->refused || !PyErr_ExceptionMatches(connection_lost)) return -1;
    PyErr_Clear(); /* closed meanwhile */
    return 0;
}
/* What lies at the buffer's tail is a frame from now on, with the first releases and what is owed. */
static void book_frame(Wire *self, const Frame *frame, Py_ssize_t size, int nreleases) {
    self->out->tail += size;
    self->credits->owed = 0;
    self->nreleased -= nreleases;
    if (self->nreleased) memmove(self->released, self->released + nreleases, (size_t)self->nreleased * sizeof *self->released);
    self->counters->frames_sent++;
    self->counters->bytes_eager += (unsigned long long)frame->payload;
}
/* Write a frame that is prepared. Room first, which may run Python; from the last look at it on nothing does. */
static int commit_frame(Wire *self, Frame *frame, PyObject **removed) {
    SendBuffer *out = self->out;
    Credits *credits = self->credits;
    int nreleases = (int)self->nreleased;
    Py_ssize_t nbytes = HEAD + REGION_NBYTES * frame->nreferences + RELEASE_NBYTES * nreleases + frame->most + 8;
    int room = frame_room(self, nbytes);
    if (room > 0 && frame->call) { /* entered before the frame can be answered */
        if (PyObject_SetAttr(frame->call, str_state, state_sent) < 0) return -1;
        room = frame_room(self, nbytes);
    }
    if (room <= 0) return room;
    if (out->refused || credits->available <= 0) return PYTHON;
    int waits = has_backlog(self);
    if (waits) return waits < 0 ? -1 : PYTHON;
    if (self->nreleased < nreleases) nreleases = (int)self->nreleased; /* another frame took them; what has come since, the next takes */
    PyObject *entry = NULL;
    if (frame->table) {
        entry = PyDict_GetItemWithError(frame->table, frame->key);
        if (!entry || (frame->call && entry != frame->call)) return PyErr_Occurred() ? -1 : GONE;
    }
    for (int i = 0; i < frame->nfilled; i++)
        if (!is_as_laid(frame->laid + frame->filled[i], (PyArrayObject *)frame->values[frame->filled[i]])) return PYTHON;
    Py_ssize_t head = HEAD + REGION_NBYTES * frame->nreferences + RELEASE_NBYTES * nreleases;
    char *at = out->data + out->tail, *p = at + head;
    int index = 0;
    if (frame->array) *p++ = (char)(0x90 | frame->count);
    for (Py_ssize_t i = 0; i < frame->count; i++) {
        PyObject *value = frame->values[i];
        if (!PyArray_CheckExact(value)) p = put_plain(p, value);
        else if (frame->laid[i].block) p = put_array(p, frame->laid + i, (PyArrayObject *)value, index++);
        else p = put_inline(p, frame->laid + i, (PyArrayObject *)value);
        if (!p) return PYTHON;
    }
    frame->payload = p - at - head;
    Py_ssize_t size = (head + frame->payload + 7) & ~(Py_ssize_t)7;
    memset(p, 0, (size_t)(at + size - p));
    put_head(self, frame, at, head, size, nreleases);
    if (entry && !frame->call) {
        *removed = Py_NewRef(entry); /* what goes with it may run Python: later */
        if (PyDict_DelItem(frame->table, frame->key) < 0) return -1;
    }
    credits->available--;
    book_frame(self, frame, size, nreleases);
    return WRITTEN;
}
/* Take back the leases of a frame that was not written; an exception that is set stays so. */
static int withdraw(Wire *self, const Frame *frame) {
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    for (int i = 0; i < frame->ngranted; i++) {
        const Laid *laid = frame->laid + frame->filled[i];
        if (!laid->block) continue;
        PyObject *number = PyLong_FromUnsignedLongLong(laid->id);
        PyObject *done = number ? PyObject_CallMethodOneArg(self->given[LEASES], str_withdraw, number) : NULL;
        Py_XDECREF(number);
        if (!done) { Py_XDECREF(type); Py_XDECREF(error); Py_XDECREF(traceback); return -1; }
        Py_DECREF(done);
    }
    if (type) { PyErr_Clear(); PyErr_Restore(type, error, traceback); }
    return 0;
}
/* One plain frame at the buffer's tail: WRITTEN; PYTHON when Python must write it (no credit, refused, too large, not plain, an
 * array outside the store), GONE when its entry has left its table meanwhile, -1 with an exception: then nothing was written.
 * Leases, releases and credits are booked. */
static int write_frame(Wire *self, Frame *frame) {
    frame->nfilled = frame->nreferences = frame->ngranted = 0;
    frame->flags = 0;
    frame->extra = 0;
    if (self->out->refused || self->credits->available <= 0 || self->nreleased > MAX_RELEASES) return PYTHON;
    PyObject *removed = NULL;
    int done = prepare_frame(self, frame);
    if (done > 0) done = self->nreleased > MAX_RELEASES ? PYTHON : commit_frame(self, frame, &removed);
    if (done != WRITTEN && frame->ngranted && withdraw(self, frame) < 0) done = -1;
    for (int i = 0; i < frame->nfilled; i++) {
        Laid *laid = frame->laid + frame->filled[i];
        Py_XDECREF(laid->code);
        Py_XDECREF(laid->descr);
        Py_XDECREF(laid->block);
    }
    Py_XDECREF(removed);
    return done;
}
/* Send what is written; the socket's troubles are Python's. */
static int wire_flush(Wire *self) {
    SendBuffer *out = self->out;
    if (buffer_idle(out)) return 0;
    int left = buffer_send(out);
    if (left == 0) return 0;
    PyObject *done;
    if (left > 0) done = PyObject_CallNoArgs(self->given[ON_BLOCKED]);
    else {
        PyObject *type, *error, *traceback;
        PyErr_Fetch(&type, &error, &traceback);
        PyErr_NormalizeException(&type, &error, &traceback);
        done = PyObject_CallOneArg(self->given[ON_BROKEN], error);
        Py_XDECREF(type);
        Py_XDECREF(error);
        Py_XDECREF(traceback);
    }
    Py_XDECREF(done);
    return done ? 0 : -1;
}
static int wire_schedule_flush(Wire *self) {
    if (self->flush_scheduled) return 0;
    self->flush_scheduled = 1;
    PyObject *done = PyObject_CallNoArgs(self->given[SCHEDULE_FLUSH]);
    Py_XDECREF(done);
    return done ? 0 : -1;
}
static PyObject *wire_next_id(Wire *self, PyObject *Py_UNUSED(ignored)) { return PyLong_FromUnsignedLongLong(++self->next_id); }

/* Take a call out of the pending ones that was not sent: 1 done, 0 somebody else has, -1 an exception. An exception that is set
 * stays so. */
static int take_back(Wire *self, PyObject *call, PyObject *id) {
    PyObject *type, *error, *traceback, *pending = self->given[PENDING];
    PyErr_Fetch(&type, &error, &traceback);
    PyObject *entry = PyDict_GetItemWithError(pending, id);
    int ours = entry == call;
    int failed = (!entry && PyErr_Occurred()) || (ours && PyDict_DelItem(pending, id) < 0);
    int sent = failed ? -1 : is_attr(call, str_state, state_sent); /* it may have ended meanwhile */
    if (sent > 0) sent = PyObject_SetAttr(call, str_state, state_queued);
    if (sent < 0) { Py_XDECREF(type); Py_XDECREF(error); Py_XDECREF(traceback); return -1; }
    PyErr_Restore(type, error, traceback);
    return ours;
}
/* call(call, actor, code, args): whether the call is on its way to an end. False: it must go the other way, and nothing was done. */
static PyObject *wire_call(Wire *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 4 || !PyTuple_Check(args[3])) { PyErr_SetString(PyExc_TypeError, "call(call, actor, code, args)"); return NULL; }
    if (!wire_is_whole(self)) return NULL;
    unsigned long actor = PyLong_AsUnsignedLong(args[1]), code = PyLong_AsUnsignedLong(args[2]);
    if (PyErr_Occurred()) return NULL;
    int waits = has_backlog(self);
    if (waits) return waits < 0 ? NULL : Py_NewRef(Py_False);
    uint64_t number = ++self->next_id;
    PyObject *call = args[0], *pending = self->given[PENDING], *id = PyLong_FromUnsignedLongLong(number);
    if (!id) return NULL;
    /* All of it before the frame can be sent, by whichever thread, and so before it can be answered. */
    if (PyObject_SetAttr(call, str_id, id) < 0 || PyObject_SetAttr(call, str_session, self->given[SESSION]) < 0 ||
        PyDict_SetItem(pending, id, call) < 0) {
        Py_DECREF(id);
        return NULL;
    }
    Frame frame;
    frame.kind = KIND_CALL;
    frame.array = 1;
    frame.actor = (uint32_t)actor;
    frame.code = code;
    frame.id = number;
    frame.values = ((PyTupleObject *)args[3])->ob_item;
    frame.count = PyTuple_GET_SIZE(args[3]);
    frame.table = pending;
    frame.key = id;
    frame.call = call;
    int written = write_frame(self, &frame);
    if (written == WRITTEN) {
        Py_DECREF(id);
        self->counters->calls++;
        /* alone: nothing to batch with, start the peer now */
        if ((PyDict_GET_SIZE(pending) == 1 ? wire_flush(self) : wire_schedule_flush(self)) < 0) return NULL;
        Py_RETURN_TRUE;
    }
    int taken = take_back(self, call, id);
    Py_DECREF(id);
    if (taken < 0) return NULL;
    if (PyErr_Occurred()) return NULL;
    return PyBool_FromLong(!taken); /* the end of the connection has taken it, and ends the call */
}
/* respond(id, value, more): whether that is done. False: the answer must go the other way, and nothing was sent.
 * answer(id, value): the same for a call that was never entered into the open ones. */
static PyObject *respond(Wire *self, PyObject *id, PyObject *const *value, int more, int entered) {
    if (!wire_is_whole(self)) return NULL;
    PyObject *open = self->given[OPEN];
    if (entered) {
        int there = PyDict_Contains(open, id);
        if (there < 0) return NULL;
        if (!there) Py_RETURN_TRUE; /* it has been answered, or the caller is gone */
    }
    int waits = has_backlog(self);
    if (waits) return waits < 0 ? NULL : Py_NewRef(Py_False);
    unsigned long long number = PyLong_AsUnsignedLongLong(id);
    if (PyErr_Occurred()) return NULL;
    Frame frame;
    frame.kind = KIND_RESPONSE;
    frame.array = 0;
    frame.actor = 0;
    frame.code = STATUS_OK;
    frame.id = number;
    frame.values = value;
    frame.count = 1;
    frame.table = entered ? open : NULL;
    frame.key = id;
    frame.call = NULL;
    int written = write_frame(self, &frame);
    if (written < 0) return NULL;
    if (written != WRITTEN) return PyBool_FromLong(written == GONE);
    int here = PyThread_get_thread_ident() == self->thread;
    if (self->feeding && here) {
        if (++self->unflushed < ANSWERS_PER_FLUSH) Py_RETURN_TRUE;
        self->unflushed = 0;
    } else if (more || (here && PyDict_GET_SIZE(open))) {
        if (wire_schedule_flush(self) < 0) return NULL;
        Py_RETURN_TRUE;
    }
    if (wire_flush(self) < 0) return NULL;
    Py_RETURN_TRUE;
}
static PyObject *wire_respond(Wire *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 3) { PyErr_SetString(PyExc_TypeError, "respond(id, value, more)"); return NULL; }
    return respond(self, args[0], args + 1, args[2] == Py_True, 1);
}
static PyObject *wire_answer(Wire *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 2) { PyErr_SetString(PyExc_TypeError, "answer(id, value)"); return NULL; }
    return respond(self, args[0], args + 1, 0, 0);
}

/* frame(kind, flags, code, actor, id, extra, payload): whether one frame without regions was written, which takes no credit.
 * False: Python must write it, and nothing was done. */
static PyObject *wire_frame(Wire *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 7) { PyErr_SetString(PyExc_TypeError, "frame(kind, flags, code, actor, id, extra, payload)"); return NULL; }
    if (!wire_is_whole(self)) return NULL;
    static const uint64_t most[6] = {0xff, 0xff, 0xffff, 0xffffffff, UINT64_MAX, UINT64_MAX};
    uint64_t fields[6];
    for (int i = 0; i < 6; i++) {
        fields[i] = PyLong_AsUnsignedLongLong(args[i]);
        if (fields[i] == UINT64_MAX && PyErr_Occurred()) {
            if (!PyErr_ExceptionMatches(PyExc_OverflowError)) return NULL;
            PyErr_Clear(); /* Python says what does not fit */
            Py_RETURN_FALSE;
        }
        if (fields[i] > most[i]) Py_RETURN_FALSE;
    }
    if (!PyBytes_CheckExact(args[6]) || self->out->refused || self->nreleased > MAX_RELEASES) Py_RETURN_FALSE;
    Frame frame;
    frame.kind = (int)fields[0];
    frame.flags = (int)fields[1];
    frame.code = fields[2];
    frame.actor = (uint32_t)fields[3];
    frame.id = fields[4];
    frame.extra = fields[5];
    frame.nfilled = frame.nreferences = 0;
    frame.payload = PyBytes_GET_SIZE(args[6]);
    int nreleases = (int)self->nreleased;
    int room = frame_room(self, HEAD + RELEASE_NBYTES * nreleases + frame.payload + 8); /* on slots this runs Python */
    if (room < 0) return NULL;
    if (!room || self->out->refused) Py_RETURN_FALSE;
    if (self->nreleased < nreleases) nreleases = (int)self->nreleased;
    Py_ssize_t head = HEAD + RELEASE_NBYTES * nreleases, size = (head + frame.payload + 7) & ~(Py_ssize_t)7;
    char *at = self->out->data + self->out->tail;
    memcpy(at + head, PyBytes_AS_STRING(args[6]), (size_t)frame.payload);
    memset(at + head + frame.payload, 0, (size_t)(size - head - frame.payload));
    put_head(self, &frame, at, head, size, nreleases);
    book_frame(self, &frame, size, nreleases);
    Py_RETURN_TRUE;
}

/* ---- leases to give back */

static PyObject *wire_release(Wire *self, PyObject *arg) {
    uint64_t id = PyLong_AsUnsignedLongLong(arg);
    if (id == (uint64_t)-1 && PyErr_Occurred()) return NULL;
    if (self->nreleased == self->released_room) {
        Py_ssize_t room = self->released_room ? 2 * self->released_room : 64;
        uint64_t *released = PyMem_Realloc(self->released, (size_t)room * sizeof *released);
        if (!released) return PyErr_NoMemory();
        self->released = released;
        self->released_room = room;
    }
    self->released[self->nreleased++] = id;
    Py_RETURN_NONE;
}
static PyObject *wire_take_releases(Wire *self, PyObject *arg) {
    Py_ssize_t most = PyLong_AsSsize_t(arg);
    if (most < 0) return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "a negative number of releases");
    Py_ssize_t n = self->nreleased < most ? self->nreleased : most;
    PyObject *list = PyList_New(0);
    for (Py_ssize_t i = 0; list && i < n; i++) {
        PyObject *number = PyLong_FromUnsignedLongLong(self->released[i]);
        if (!number || PyList_Append(list, number) < 0) Py_CLEAR(list);
        Py_XDECREF(number);
    }
    if (list) {
        self->nreleased -= n;
        memmove(self->released, self->released + n, (size_t)self->nreleased * sizeof *self->released);
    }
    return list;
}

/* ---- reading */

typedef struct { /* an array among the arguments, found but not made yet */
    Py_ssize_t place;
    int region, nd;
    npy_intp dims[MAX_DIMS];
    PyArray_Descr *dtype; /* ours */
} Found;
typedef struct { /* what a plain frame holds */
    PyObject *list; /* without the arrays that go by reference */
    Found found[MAX_ARRAYS];
    int nfound;
} Values;

/* Dtype and shape as they stand in an array's extension, and the bytes that they make: 1 read, and the dtype is the caller's to let
 * go of; 0 Python must look at it. NumPy refuses a shape whose axes, those of no elements left out, make more than it can count,
 * and gives elements of no bytes some where it allocates: of that Python makes a ProtocolError, or the array. */
static int get_layout(Wire *self, const unsigned char **at, const unsigned char *end, Found *found, uint64_t *nbytes) {
    const unsigned char *p = *at;
    PyObject *code = p < end && (*p & 0xe0) == 0xa0 ? get_plain(&p, end) : NULL;
    if (!code) return 0;
    PyArray_Descr *dtype = (PyArray_Descr *)PyDict_GetItemWithError(self->given[DTYPES], code);
    Py_DECREF(code);
    if (!dtype || p >= end || (*p & 0xf0) != 0x90 || (*p & 15) > MAX_DIMS) return 0;
    found->nd = *p++ & 15;
    uint64_t sum = (uint64_t)PyDataType_ELSIZE(dtype);
    int empty = 0;
    if (sum == 0) return 0;
    for (int i = 0; i < found->nd; i++) {
        uint64_t n;
        if (p < end && *p < 0x80) n = *p++;
        else if (end - p > 1 && *p == 0xcc) { n = p[1]; p += 2; }
        else if (end - p > 2 && *p == 0xcd) { n = get_big(p + 1, 2); p += 3; }
        else if (end - p > 4 && *p == 0xce) { n = get_big(p + 1, 4); p += 5; }
        else if (end - p > 8 && *p == 0xcf) { n = get_big(p + 1, 8); p += 9; }
        else return 0;
        if (n == 0) empty = 1;
        else if (__builtin_mul_overflow(sum, n, &sum) || sum > INT64_MAX) return 0;
        found->dims[i] = (npy_intp)n;
    }
    *nbytes = empty ? 0 : sum;
    found->dtype = (PyArray_Descr *)Py_NewRef(dtype);
    *at = p;
    return 1;
}
/* An array extension at *at: 1 read, 0 Python must look at it. */
static int get_array(Wire *self, const unsigned char **at, const unsigned char *end, const unsigned char *regions, int nregions,
                     Found *found) {
    const unsigned char *p = *at;
    uint64_t nbytes;
    if (end - p < 6 || p[0] != 0xc7 || p[2] != EXT_ARRAY || end - p < 3 + p[1]) return 0;
    end = p + 3 + p[1];
    p += 3;
    if (end - p < 4 || p[0] != 0x93 || p[1] >= nregions) return 0;
    found->region = p[1];
    p += 2;
    if (!get_layout(self, &p, end, found, &nbytes)) return 0;
    const unsigned char *region = regions + REGION_NBYTES * found->region;
    if (p != end || nbytes == 0 || nbytes != GET(uint64_t, region + 32)) { Py_CLEAR(found->dtype); return 0; }
    *at = end;
    return 1;
}
/* An array within the frame, a copy of its own; NULL without an exception when Python must look at it. */
static PyObject *get_inline(Wire *self, const unsigned char **at, const unsigned char *end) {
    const unsigned char *p = *at;
    Py_ssize_t length, head = end - p > 2 && p[0] == 0xc7 ? 3 : 4;
    if (end - p < 4 || (p[0] != 0xc7 && p[0] != 0xc8) || p[head - 1] != EXT_INLINE_ARRAY) return NULL;
    length = (Py_ssize_t)get_big(p + 1, (int)head - 2);
    if (end - p - head < length) return NULL;
    end = p + head + length;
    p += head;
    if (end - p < 4 || *p++ != 0x94) return NULL;
    Py_ssize_t n = -1, left = end - p - 3;
    if (p[0] == 0xc4) { n = p[1]; p += 2; left += 1; }
    else if (p[0] == 0xc5) { n = (Py_ssize_t)get_big(p + 1, 2); p += 3; }
    if (n < 0 || n > left) return NULL;
    const unsigned char *bytes = p;
    p += n;
    Found found;
    uint64_t nbytes;
    if (!get_layout(self, &p, end, &found, &nbytes)) return NULL;
    if (end - p != 1 || (*p != 0xc2 && *p != 0xc3) || nbytes != (uint64_t)n) { Py_DECREF(found.dtype); return NULL; }
    PyObject *array = PyArray_NewFromDescr(&PyArray_Type, found.dtype, found.nd, found.dims, NULL, NULL, 0, NULL);
    if (!array) return NULL;
    memcpy(PyArray_DATA((PyArrayObject *)array), bytes, (size_t)n);
    if (*p == 0xc2) PyArray_CLEARFLAGS((PyArrayObject *)array, NPY_ARRAY_WRITEABLE);
    *at = end;
    return array;
}
static void drop_values(Values *values) {
    Py_CLEAR(values->list);
    while (values->nfound > 0) Py_DECREF(values->found[--values->nfound].dtype);
}
/* `count` values that are plain or arrays: 1 read, 0 Python must read them, -1 an exception. Those that go by reference are found
 * only: nothing is leased yet. */
static int read_values(Wire *self, Values *values, const unsigned char *p, const unsigned char *end, Py_ssize_t count,
                       const unsigned char *regions, int nregions) {
    if (nregions > MAX_ARRAYS) return 0;
    for (int i = 0; i < nregions; i++) { /* every reference is checked before any is used */
        const unsigned char *region = regions + REGION_NBYTES * i;
        uint64_t offset = GET(uint64_t, region + 24), nbytes = GET(uint64_t, region + 32);
        if (memcmp(region, self->peer, 16) || GET(uint16_t, region + 48) /* kind, authenticate */ || GET(uint64_t, region + 40) ||
            offset > self->arena_nbytes || nbytes > self->arena_nbytes - offset)
            return 0;
    }
    if (!(values->list = PyList_New(count))) return -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *value = NULL;
        if (p < end && (*p == 0xc7 || *p == 0xc8) && (value = get_inline(self, &p, end))) {
            /* done */
        } else if (PyErr_Occurred()) {
            /* no memory */
        } else if (p < end && *p == 0xc7) {
            Found *found = values->found + values->nfound;
            if (values->nfound < nregions && get_array(self, &p, end, regions, nregions, found)) {
                values->nfound++;
                found->place = i;
                if (found->region == values->nfound - 1) value = Py_NewRef(Py_None);
            }
        } else
            value = get_plain(&p, end);
        if (!value) return PyErr_Occurred() ? -1 : 0;
        PyList_SET_ITEM(values->list, i, value);
    }
    return p == end && values->nfound == nregions;
}
/* The arrays that were found, each over a lease: 0, or -1 with an exception. */
static int lease_values(Wire *self, Values *values, const unsigned char *regions) {
    for (int i = 0; i < values->nfound; i++) {
        Found *found = values->found + i;
        const unsigned char *region = regions + REGION_NBYTES * i;
        uint64_t nbytes = GET(uint64_t, region + 32), address = 0;
        PyObject *lease = PyObject_CallFunction(self->given[MAKE_LEASE], "KKK", (unsigned long long)GET(uint64_t, region + 16),
                                                (unsigned long long)GET(uint64_t, region + 24), (unsigned long long)nbytes);
        PyObject *array = NULL;
        if (lease && get_u64(lease, str_address, &address) == 0) {
            array = PyArray_NewFromDescr(&PyArray_Type, (PyArray_Descr *)Py_NewRef(found->dtype), found->nd, found->dims, NULL,
                                         (void *)(uintptr_t)address, NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED, NULL);
        }
        if (array && PyArray_SetBaseObject((PyArrayObject *)array, Py_NewRef(lease)) < 0) Py_CLEAR(array);
        if (array) PyArray_UpdateFlags((PyArrayObject *)array, NPY_ARRAY_UPDATE_ALL);
        Py_XDECREF(lease);
        if (!array) return -1;
        int again = 0; /* the same object, offset and bytes: mapped once, however often the frame names them */
        for (int j = 0; j < i && !again; j++) again = !memcmp(region + 16, regions + REGION_NBYTES * j + 16, 24);
        if (!again) self->counters->bytes_mapped += nbytes;
        PyList_SetItem(values->list, found->place, array);
    }
    return 0;
}
/* What a frame says beside its payload: the credits that it returns, the one that it takes, and the leases that it gives back. 0, or
 * -1 with a ProtocolError: the peer may not say so. */
static int judge(Wire *self, int credits, const unsigned char *releases, uint64_t nreleases) {
    if (credits_do_consumed(self->credits, 1) < 0 || (credits && credits_do_returned(self->credits, credits) < 0)) return -1;
    for (uint64_t i = 0; i < nreleases; i++, releases += RELEASE_NBYTES) {
        PyObject *number = PyLong_FromUnsignedLongLong(GET(uint64_t, releases)), *times = PyLong_FromUnsignedLong(GET(uint32_t, releases + 8));
        PyObject *released = number && times ? PyObject_CallMethodObjArgs(self->given[LEASES], str_release, number, times, NULL) : NULL;
        Py_XDECREF(number);
        Py_XDECREF(times);
        if (!released) return -1;
        Py_DECREF(released);
    }
    return 0;
}
/* The call that waits under `id` has its result, unless what ran meanwhile has ended it; `ran`: whether anything may have. */
static int complete(Wire *self, PyObject *id, PyObject *call, PyObject *value, int ran) {
    PyObject *pending = self->given[PENDING];
    if (ran && PyDict_GetItemWithError(pending, id) != call) return PyErr_Occurred() ? -1 : 0;
    if (PyDict_DelItem(pending, id) < 0) return -1;
    Py_INCREF(value);
    PyObject *done = PyObject_CallMethodOneArg(call, str_complete_plain, value);
    Py_DECREF(value);
    Py_XDECREF(done);
    return done ? 0 : -1;
}
/* host.receive_plain(session, id, code, timeout_ns, arguments); without a host on_call(actor, the same but session). The list is
 * handed over: nothing of ours keeps an argument alive that it has lost. */
static int deliver(Wire *self, const unsigned char *frame, PyObject *id, PyObject **list) {
    int twice = PyDict_Contains(self->given[OPEN], id);
    if (twice > 0) PyErr_Format(protocol_error, "the peer opened call %S twice", id);
    if (twice) return -1;
    PyObject *actor = PyLong_FromUnsignedLong(GET(uint32_t, frame + AT_ACTOR)), *done = NULL;
    PyObject *host = actor ? Py_XNewRef(PyDict_GetItemWithError(self->given[HOSTS], actor)) : NULL;
    PyObject *code = PyLong_FromLong(GET(uint16_t, frame + AT_CODE)), *timeout = PyLong_FromUnsignedLongLong(GET(uint64_t, frame + AT_EXTRA));
    if (!PyErr_Occurred()) {
        PyObject *stack[6] = {host, self->given[SESSION], id, code, timeout, *list};
        Py_INCREF(stack[1]);
        *list = NULL;
        if (host) done = PyObject_VectorcallMethod(str_receive_plain, stack, 6, NULL);
        else {
            PyObject *others[6] = {NULL, actor, id, code, timeout, stack[5]};
            done = PyObject_Vectorcall(self->given[ON_CALL], others + 1, 5 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
        }
        Py_DECREF(stack[1]);
        Py_DECREF(stack[5]);
    }
    Py_XDECREF(timeout);
    Py_XDECREF(code);
    Py_XDECREF(host);
    Py_XDECREF(actor);
    Py_XDECREF(done);
    return done ? 0 : -1;
}
/* Take in one frame of `length` bytes behind its prefix: 1 done, 0 Python must, -1 an exception. It is judged first, and changes
 * something afterwards: a call whose answer is refused stays open, for the end of the connection to end it. */
static int take_in(Wire *self, const unsigned char *frame, Py_ssize_t length) {
    if (memcmp(frame + 4, constant, SHARED_NBYTES) || frame[AT_FLAGS]) return 0;
    uint64_t room = (uint64_t)length + 4 - HEAD, nregions = GET(uint32_t, frame + AT_NREGIONS);
    if (nregions * REGION_NBYTES > room || GET(uint32_t, frame + AT_RELEASES_OFFSET) != 44 + nregions * REGION_NBYTES) return 0;
    room -= nregions * REGION_NBYTES;
    const unsigned char *regions = frame + AT_REGIONS, *releases = regions + nregions * REGION_NBYTES + 8;
    uint64_t nreleases = GET(uint32_t, releases - 4);
    if (nreleases * RELEASE_NBYTES > room ||
        GET(uint32_t, frame + AT_PAYLOAD_OFFSET) != 44 + nregions * REGION_NBYTES + nreleases * RELEASE_NBYTES)
        return 0;
    room -= nreleases * RELEASE_NBYTES;
    const unsigned char *p = releases + nreleases * RELEASE_NBYTES + 4, *end;
    uint64_t payload = GET(uint32_t, p - 4);
    if (payload > room) return 0;
    end = p + payload;
    int kind = frame[AT_KIND], arrays = (int)(nregions > MAX_ARRAYS ? MAX_ARRAYS + 1 : nregions);
    Py_ssize_t count = 1;
    if (kind == KIND_CALL && p < end && (*p & 0xf0) == 0x90) count = *p++ & 15;
    else if (kind != KIND_RESPONSE || GET(uint16_t, frame + AT_CODE) != STATUS_OK) return 0;
    PyObject *call = NULL, *id = PyLong_FromUnsignedLongLong(GET(uint64_t, frame + AT_ID));
    if (!id) return -1;
    Values values;
    values.list = NULL;
    values.nfound = 0;
    int taken = read_values(self, &values, p, end, count, regions, arrays);
    if (taken > 0 && kind == KIND_RESPONSE && !(call = Py_XNewRef(PyDict_GetItemWithError(self->given[PENDING], id))))
        taken = PyErr_Occurred() ? -1 : 0;
    if (taken > 0 && (judge(self, GET(uint16_t, frame + AT_CREDITS), releases, nreleases) < 0 || lease_values(self, &values, regions) < 0))
        taken = -1;
    if (taken > 0 && (call ? complete(self, id, call, PyList_GET_ITEM(values.list, 0), nreleases || values.nfound) : deliver(self, frame, id, &values.list)) < 0)
        taken = -1;
    drop_values(&values);
    Py_XDECREF(call);
    Py_DECREF(id);
    return taken;
}
/* Each of the whole frames in the first `total` bytes of `data`, in order. Plain results complete the call that waits for them;
 * plain calls go to their host; all else to on_other(view, at, total), which returns where the next frame begins. */
static int wire_take(Wire *self, PyObject *view, const unsigned char *data, Py_ssize_t total) {
    Py_ssize_t at = 0;
    while (at < total) {
        Py_ssize_t length = total - at >= 4 ? (Py_ssize_t)GET(uint32_t, data + at) : -1;
        int taken = length >= HEAD - 4 && length <= self->max_frame && length <= total - at - 4 ? take_in(self, data + at, length) : 0;
        if (taken < 0) return -1;
        if (taken) {
            self->counters->frames_received++;
            at += length + 4;
            continue;
        }
        PyObject *next = PyObject_CallFunction(self->given[ON_OTHER], "Onn", view, at, total);
        if (!next) return -1;
        Py_ssize_t to = PyLong_AsSsize_t(next);
        Py_DECREF(next);
        if (to == -1 && PyErr_Occurred()) return -1;
        if (to <= at || to > total) { PyErr_SetString(PyExc_ValueError, "on_other did not move on"); return -1; }
        at = to;
    }
    return 0;
}
/* A batch: what answers it on the loop's thread leaves together, at its end. */
static int wire_batch(Wire *self, PyObject *view, const unsigned char *data, Py_ssize_t total) {
    self->feeding = 1;
    int failed = wire_take(self, view, data, total);
    self->feeding = 0;
    if (self->unflushed) {
        PyObject *type, *error, *traceback;
        PyErr_Fetch(&type, &error, &traceback);
        self->unflushed = 0;
        int flushed = wire_flush(self);
        if (type) { PyErr_Clear(); PyErr_Restore(type, error, traceback); }
        else failed |= flushed;
    }
    if (failed) return -1;
    int waits = has_backlog(self);
    if (waits || self->credits->owed >= self->credits->threshold) {
        PyObject *done = waits < 0 ? NULL : PyObject_CallNoArgs(self->given[ON_BATCH]);
        Py_XDECREF(done);
        if (!done) return -1;
    }
    return 0;
}
static PyObject *wire_feed(Wire *self, PyObject *arg) {
    Py_buffer view;
    if (!wire_is_whole(self)) return NULL;
    if (PyObject_GetBuffer(arg, &view, PyBUF_SIMPLE) < 0) return NULL;
    int failed = wire_batch(self, arg, view.buf, view.len);
    PyBuffer_Release(&view);
    if (failed) return NULL;
    Py_RETURN_NONE;
}
static PyObject *wire_get(Wire *self, void *Py_UNUSED(closure)) { return PyLong_FromSsize_t(self->nreleased); }
static PyMemberDef wire_members[] = {
    {"flush_scheduled", T_BOOL, offsetof(Wire, flush_scheduled), 0, "schedule_flush was called; whoever flushes resets it."},
    {NULL, 0, 0, 0, NULL}};
static PyMethodDef wire_methods[] = {
    {"call", (PyCFunction)(void (*)(void))wire_call, METH_FASTCALL, "call(call, actor, code, args): whether it was sent."},
    {"respond", (PyCFunction)(void (*)(void))wire_respond, METH_FASTCALL, "respond(id, value, more): whether that is done."},
    {"answer", (PyCFunction)(void (*)(void))wire_answer, METH_FASTCALL, "answer(id, value): respond to a call that is not open."},
    {"frame", (PyCFunction)(void (*)(void))wire_frame, METH_FASTCALL, "frame(kind, flags, code, actor, id, extra, payload): whether it was written."},
    {"next_id", (PyCFunction)wire_next_id, METH_NOARGS, "An id for a call that goes the other way."},
    {"feed", (PyCFunction)wire_feed, METH_O, "feed(data): take in whole frames."},
    {"release", (PyCFunction)wire_release, METH_O, "A lease goes back with the next frame."},
    {"take_releases", (PyCFunction)wire_take_releases, METH_O, "The ids of at most n leases to give back."},
    {NULL, NULL, 0, NULL}};
static PyGetSetDef wire_getset[] = {
    {"releases", (getter)wire_get, NULL, "Leases that wait to go back.", NULL}, {NULL, NULL, NULL, NULL, NULL}};
static PyTypeObject WireType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "zcactor.native._hot.Wire",
    .tp_basicsize = sizeof(Wire), .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, .tp_new = wire_new,
    .tp_dealloc = (destructor)wire_dealloc, .tp_traverse = (traverseproc)wire_traverse,
    .tp_clear = (inquiry)wire_clear, .tp_methods = wire_methods, .tp_getset = wire_getset, .tp_members = wire_members,
    .tp_doc = "The plain frames of one session: Wire(out, credits, counters, process, peer, eager_limit, max_frame, arena_nbytes, "
              "given); given names what it calls and shares, see zcactor.rpc.session."};

/* ---------------------------------------------------------------- Reader: what comes in on a socket */

typedef struct {
    PyObject_HEAD
    int fd, closed;
    Py_ssize_t max_frame, capacity, filled;
    PyObject *buffer, *view, *deliver, *ended; /* ended(error, from_receiver) */
    Wire *wire;                                /* takes frames in here; NULL: deliver(view) does */
    PyObject *decrypt, *invalid;               /* opens records, or NULL; what it raises for a bad one */
    uint64_t count;                            /* records so far */
    char *sealed;                              /* records come in here */
    Py_ssize_t sealed_filled;
} Reader;
#define SEALED_NBYTES (RECORD_HEAD + RECORD_MOST + RECORD_TAG) /* pages that no record reaches are never made */

static int reader_traverse(Reader *self, visitproc visit, void *arg) {
    Py_VISIT(self->deliver);
    Py_VISIT(self->ended);
    Py_VISIT(self->wire);
    Py_VISIT(self->decrypt);
    Py_VISIT(self->invalid);
    return 0;
}
static int reader_clear(Reader *self) {
    self->closed = 1;
    Py_CLEAR(self->deliver);
    Py_CLEAR(self->ended);
    Py_CLEAR(self->wire);
    return 0;
}
static void reader_dealloc(Reader *self) {
    PyObject_GC_UnTrack(self);
    reader_clear(self);
    Py_XDECREF(self->decrypt);
    Py_XDECREF(self->invalid);
    PyMem_RawFree(self->sealed);
    Py_XDECREF(self->view);
    Py_XDECREF(self->buffer);
    Py_TYPE(self)->tp_free((PyObject *)self);
}
static PyObject *reader_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *wire, *deliver, *ended, *decrypt = NULL, *invalid = NULL;
    int fd;
    Py_ssize_t capacity, max_frame;
    unsigned long long count = 0;
    if (kwargs && PyDict_GET_SIZE(kwargs)) return PyErr_Format(PyExc_TypeError, "Reader takes no keywords");
    if (!PyArg_ParseTuple(args, "innOOO|OKO", &fd, &capacity, &max_frame, &wire, &deliver, &ended, &decrypt, &count, &invalid)) return NULL;
    if (decrypt && !invalid) return PyErr_Format(PyExc_TypeError, "decrypt comes with a count and an exception");
    if (max_frame < 0 || max_frame > PY_SSIZE_T_MAX - 4 || capacity < max_frame + 4)
        return PyErr_Format(PyExc_ValueError, "the largest frame does not fit");
    Reader *self = (Reader *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->fd = fd;
    self->capacity = capacity;
    self->max_frame = max_frame;
    self->count = count;
    self->decrypt = Py_XNewRef(decrypt);
    self->invalid = Py_XNewRef(invalid);
    self->deliver = Py_NewRef(deliver);
    self->ended = Py_NewRef(ended);
    self->wire = Py_TYPE(wire) == &WireType ? (Wire *)Py_NewRef(wire) : NULL;
    self->buffer = PyByteArray_FromStringAndSize(NULL, capacity);
    self->view = self->buffer ? PyMemoryView_FromObject(self->buffer) : NULL; /* also keeps the buffer from being resized */
    if (self->view && decrypt && !(self->sealed = PyMem_RawMalloc(SEALED_NBYTES))) PyErr_NoMemory();
    if (self->view && (!decrypt || self->sealed)) return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}
/* zcactor.transport.framing.whole_frames: bytes of whole frames at the start, -1 with a ProtocolError. */
static Py_ssize_t whole_frames(const unsigned char *data, Py_ssize_t end, Py_ssize_t max_frame) {
    Py_ssize_t done = 0;
    while (end - done >= 4) {
        Py_ssize_t length = (Py_ssize_t)GET(uint32_t, data + done);
        if (length > max_frame) {
            if (done) break;
            PyErr_Format(protocol_error, "the peer announced a frame of %zd bytes; at most %zd are allowed", length, max_frame);
            return -1;
        }
        if (length > end - done - 4) break;
        done += 4 + length;
    }
    return done;
}
static PyObject *reader_ended(Reader *self, PyObject *error, PyObject *from_receiver) {
    PyObject *done = self->ended ? PyObject_CallFunctionObjArgs(self->ended, error, from_receiver, NULL) : Py_NewRef(Py_None);
    if (!done) return NULL;
    Py_DECREF(done);
    Py_RETURN_FALSE;
}
static PyObject *raised(void) {
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback) PyException_SetTraceback(error, traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return error;
}
static PyObject *reader_deliver(Reader *self, Py_ssize_t end);
static PyObject *reader_open(Reader *self, Py_ssize_t end);

/* Read once and deliver: False when there was nothing to read, or the connection ended; `ended` was told why. */
static PyObject *reader_readable(Reader *self, PyObject *Py_UNUSED(ignored)) {
    if (self->closed) Py_RETURN_FALSE;
    char *into = self->decrypt ? self->sealed + self->sealed_filled : PyByteArray_AS_STRING(self->buffer) + self->filled;
    Py_ssize_t room = self->decrypt ? SEALED_NBYTES - self->sealed_filled : self->capacity - self->filled;
    if (self->decrypt && room > RECEIVE_MOST) room = RECEIVE_MOST;
    ssize_t received = recv(self->fd, into, (size_t)room, MSG_DONTWAIT);
    if (received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) Py_RETURN_FALSE;
    PyObject *error = Py_None;
    if (received < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        error = raised();
    }
    if (received <= 0) {
        PyObject *answer = reader_ended(self, error, Py_False);
        if (received < 0) Py_DECREF(error);
        return answer;
    }
    return self->decrypt ? reader_open(self, self->sealed_filled + received) : reader_deliver(self, self->filled + received);
}
/* The first `end` bytes of the buffer are there: deliver the whole frames. False when the connection ended. */
static PyObject *reader_deliver(Reader *self, Py_ssize_t end) {
    unsigned char *data = (unsigned char *)PyByteArray_AS_STRING(self->buffer);
    Py_ssize_t done;
    Py_INCREF(self);
    while ((done = whole_frames(data, end, self->max_frame)) > 0) {
        int failed;
        if (self->wire) failed = wire_batch(self->wire, self->view, data, done);
        else {
            PyObject *part = PySequence_GetSlice(self->view, 0, done), *taken = part ? PyObject_CallOneArg(self->deliver, part) : NULL;
            failed = !taken;
            Py_XDECREF(taken);
            Py_XDECREF(part);
        }
        if (failed) { done = -1; break; }
        end -= done;
        if (end == 0 || self->closed) break;
        memmove(data, data + done, (size_t)end);
    }
    self->filled = end;
    PyObject *answer;
    if (done < 0) {
        PyObject *error = raised();
        answer = reader_ended(self, error, Py_True);
        Py_XDECREF(error);
    } else
        answer = PyBool_FromLong(!self->closed);
    Py_DECREF(self);
    return answer;
}
/* Deliver what a record held, frames or parts of them. False when the connection ended. */
static PyObject *reader_feed(Reader *self, PyObject *plain) {
    Py_ssize_t size = PyBytes_GET_SIZE(plain);
    PyObject *answer = PyBool_FromLong(!self->closed);
    for (Py_ssize_t at = 0, n; at < size && answer == Py_True; at += n) {
        n = self->capacity - self->filled; /* at least 1: what is left is less than the largest frame */
        if (n > size - at) n = size - at;
        memcpy(PyByteArray_AS_STRING(self->buffer) + self->filled, PyBytes_AS_STRING(plain) + at, (size_t)n);
        Py_SETREF(answer, reader_deliver(self, self->filled + n));
    }
    return answer;
}
/* The plain text of the record at `at`, `end` bytes of records being there: 1 opened, 0 it is not all there, -1 with an exception. */
static int reader_next_record(Reader *self, Py_ssize_t at, Py_ssize_t end, PyObject **plain) {
    if (end - at < RECORD_HEAD) return 0;
    uint32_t nbytes = GET(uint32_t, self->sealed + at);
    if (nbytes == 0 || nbytes > RECORD_MOST) {
        PyErr_Format(protocol_error, "the peer announced a record of %lu bytes; 1 to %d are allowed", (unsigned long)nbytes, RECORD_MOST);
        return -1;
    }
    Py_ssize_t size = (Py_ssize_t)nbytes + RECORD_TAG;
    if (size > end - at - RECORD_HEAD) return 0;
    PyObject *text = PyBytes_FromStringAndSize(self->sealed + at + RECORD_HEAD, size);
    if (!text) return -1;
    *plain = seal_apply(self->decrypt, &self->count, text, nbytes);
    Py_DECREF(text);
    if (*plain) return 1;
    if (PyErr_ExceptionMatches(self->invalid))
        PyErr_Format(protocol_error, "record %llu from the peer does not open: somebody forged, changed, repeated or dropped one",
                     (unsigned long long)self->count - 1);
    return -1;
}
/* The first `end` bytes of records are there: open and deliver the whole ones. False when the connection ended. */
static PyObject *reader_open(Reader *self, Py_ssize_t end) {
    Py_ssize_t at = 0;
    PyObject *answer = Py_NewRef(Py_True), *plain;
    int opened;
    Py_INCREF(self);
    while (answer == Py_True && (opened = reader_next_record(self, at, end, &plain)) != 0) {
        if (opened < 0) {
            PyObject *error = raised();
            Py_SETREF(answer, reader_ended(self, error, Py_True));
            Py_XDECREF(error);
            break;
        }
        at += RECORD_HEAD + PyBytes_GET_SIZE(plain) + RECORD_TAG;
        Py_SETREF(answer, reader_feed(self, plain));
        Py_DECREF(plain);
    }
    if (at) memmove(self->sealed, self->sealed + at, (size_t)(end - at));
    self->sealed_filled = end - at;
    Py_DECREF(self);
    return answer;
}
/* Nothing is read or delivered from here on. */
static PyObject *reader_close(Reader *self, PyObject *Py_UNUSED(ignored)) {
    self->closed = 1;
    Py_RETURN_NONE;
}
static PyMethodDef reader_methods[] = {
    {"readable", (PyCFunction)reader_readable, METH_NOARGS, "Read once and deliver; False when there was nothing, or it ended."},
    {"close", (PyCFunction)reader_close, METH_NOARGS, "Read nothing more."},
    {NULL, NULL, 0, NULL}};
static PyTypeObject ReaderType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "zcactor.native._hot.Reader",
    .tp_basicsize = sizeof(Reader), .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, .tp_new = reader_new,
    .tp_dealloc = (destructor)reader_dealloc, .tp_traverse = (traverseproc)reader_traverse,
    .tp_clear = (inquiry)reader_clear, .tp_methods = reader_methods,
    .tp_doc = "Frames from a socket: Reader(fd, capacity, max_frame, wire, deliver, ended), and decrypt, records opened before, what "
              "decrypt raises where they are sealed."};

static PyObject *setup(PyObject *Py_UNUSED(module), PyObject *args) {
    const char *bytes;
    Py_ssize_t n;
    PyObject *error, *lost, *queued, *sent;
    if (!PyArg_ParseTuple(args, "y#OOOO", &bytes, &n, &error, &lost, &queued, &sent)) return NULL;
    if (n != CONSTANT_NBYTES) return PyErr_Format(PyExc_ValueError, "the template has %zd bytes instead of %d", n, CONSTANT_NBYTES);
    memcpy(constant, bytes, CONSTANT_NBYTES);
    Py_XSETREF(protocol_error, Py_NewRef(error));
    Py_XSETREF(connection_lost, Py_NewRef(lost));
    Py_XSETREF(state_queued, Py_NewRef(queued));
    Py_XSETREF(state_sent, Py_NewRef(sent));
    Py_RETURN_NONE;
}

/* The number of a class's present state, 0 where it has none. A lookup of an attribute that every class has, and that
   is found beside the class rather than in its metaclass, makes the interpreter number it. */
static PyObject *type_version(PyObject *Py_UNUSED(module), PyObject *given) {
    if (!PyType_Check(given)) return PyErr_Format(PyExc_TypeError, "a class is needed, not %.80s", Py_TYPE(given)->tp_name);
    PyObject *found = PyObject_GetAttrString(given, "__init__");
    if (!found) return NULL;
    Py_DECREF(found);
    PyTypeObject *type = (PyTypeObject *)given;
    return PyLong_FromUnsignedLong(PyType_HasFeature(type, Py_TPFLAGS_VALID_VERSION_TAG) ? type->tp_version_tag : 0);
}
static PyMethodDef functions[] = {
    {"type_version", type_version, METH_O, "type_version(class): the number of its present state, 0 for none."},
    {"setup", setup, METH_VARARGS, "setup(template, ProtocolError, ConnectionLost, CallState.QUEUED, CallState.SENT): before anything else."},
    LIVING_METHOD
    {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "zcactor.native._hot", .m_size = -1, .m_methods = functions,
                                        .m_doc = "Plain frames, credits and send buffers in C; see the comment in _hot.c."};
PyMODINIT_FUNC PyInit__hot(void) {
    import_array();
    struct { PyObject **to; const char *text; } names[] = {
        {&str_complete_plain, "complete_plain"}, {&str_grant, "grant"}, {&str_withdraw, "withdraw"}, {&str_release, "release"}, {&str_store, "store"}, {&str_sealed, "sealed"},
        {&str_exported, "exported"}, {&str_id, "id"}, {&str_offset, "offset"}, {&str_address, "address"},
        {&str_session, "session"}, {&str_state, "state"}, {&str_receive_plain, "receive_plain"},
        {&str_full, "full"}, {&str_flush, "flush"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!(*names[i].to = PyUnicode_InternFromString(names[i].text))) return NULL;
    struct { PyTypeObject *type; const char *name; } types[] = {
        {&CreditsType, "Credits"}, {&CountersType, "Counters"}, {&SendBufferType, "SendBuffer"}, {&WireType, "Wire"},
        {&ReaderType, "Reader"}, {&CipherType, "Cipher"}};
    PyObject *module = PyModule_Create(&definition);
    for (size_t i = 0; module && i < sizeof types / sizeof *types; i++) {
        COUNT_OBJECTS(types[i].type);
        if (PyType_Ready(types[i].type) < 0 || PyModule_AddObjectRef(module, types[i].name, (PyObject *)types[i].type) < 0)
            Py_CLEAR(module);
    }
    return module;
}
