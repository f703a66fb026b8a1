/* Reader: the bytes that a socket receives, whole frames or encrypted records of them. */
#include "hot.h"

typedef struct {
    PyObject_HEAD
    int fd, closed;
    Py_ssize_t max_frame, capacity, filled;
    PyObject *buffer, *view, *deliver, *ended; /* ended(error, from_receiver) */
    Wire *wire;                                /* processes frames; NULL: deliver(view) does */
    Direction opened;                          /* of records, if they are sealed */
    PyObject *invalid;                         /* its exception for a bad record */
    char *sealed;                              /* buffer of received records */
    Py_ssize_t sealed_filled;
    PyObject *module;
    State *state; /* of the module */
} Reader;
#define SEALED_NBYTES (RECORD_HEAD + RECORD_MOST + RECORD_TAG) /* pages that no record reaches take no memory */

static int reader_traverse(Reader *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->module);
    Py_VISIT(self->deliver);
    Py_VISIT(self->ended);
    Py_VISIT(self->wire);
    Py_VISIT(self->opened.apply);
    Py_VISIT(self->opened.turn);
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
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    reader_clear(self);
    direction_clear(&self->opened);
    Py_XDECREF(self->invalid);
    PyMem_RawFree(self->sealed);
    Py_XDECREF(self->view);
    Py_XDECREF(self->buffer);
    Py_DECREF(self->module);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}
static PyObject *reader_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *wire, *deliver, *ended, *decrypt = NULL, *turn = NULL, *invalid = NULL;
    int fd;
    Py_ssize_t capacity, max_frame;
    unsigned long long count = 0, until = 0;
    State *state;
    PyObject *module = module_of(type, &state);
    if (!module) return NULL;
    if (kwargs && PyDict_GET_SIZE(kwargs)) return PyErr_Format(PyExc_TypeError, "Reader takes no keywords");
    if (!PyArg_ParseTuple(args, "innOOO|OKKOO", &fd, &capacity, &max_frame, &wire, &deliver, &ended, &decrypt, &count,
                          &until, &turn, &invalid))
        return NULL;
    if (decrypt && !invalid)
        return PyErr_Format(PyExc_TypeError, "decrypt comes with count, until, turn and an exception");
    if (max_frame < 0 || max_frame > PY_SSIZE_T_MAX - 4 || capacity < max_frame + 4)
        return PyErr_Format(PyExc_ValueError, "the largest frame does not fit");
    Reader *self = (Reader *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->module = Py_NewRef(module);
    self->state = state;
    self->fd = fd;
    self->capacity = capacity;
    self->max_frame = max_frame;
    self->invalid = Py_XNewRef(invalid);
    self->deliver = Py_NewRef(deliver);
    self->ended = Py_NewRef(ended);
    self->wire = Py_TYPE(wire) == state->wire_type ? (Wire *)Py_NewRef(wire) : NULL;
    self->buffer = PyByteArray_FromStringAndSize(NULL, capacity);
    self->view =
        self->buffer ? PyMemoryView_FromObject(self->buffer) : NULL; /* also keeps the buffer from being resized */
    int keyed = !decrypt || direction_init(&self->opened, decrypt, turn, count, until) == 0;
    if (self->view && keyed && decrypt && !(self->sealed = PyMem_RawMalloc(SEALED_NBYTES))) PyErr_NoMemory();
    if (self->view && keyed && (!decrypt || self->sealed)) return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}
/* zcactor.transport.frames.whole_frames: bytes of whole frames at the start, -1 with a ProtocolError. */
static Py_ssize_t whole_frames(const Reader *self, const unsigned char *data, Py_ssize_t end) {
    Py_ssize_t done = 0;
    while (end - done >= 4) {
        Py_ssize_t length = (Py_ssize_t)GET(uint32_t, data + done);
        if (length > self->max_frame) {
            if (done) break;
            PyErr_Format(self->state->protocol_error,
                         "the peer announced a frame of %zd bytes; at most %zd are allowed", length, self->max_frame);
            return -1;
        }
        if (length > end - done - 4) break;
        done += 4 + length;
    }
    return done;
}
static PyObject *reader_ended(Reader *self, PyObject *error, PyObject *from_receiver) {
    PyObject *done =
        self->ended ? PyObject_CallFunctionObjArgs(self->ended, error, from_receiver, NULL) : Py_NewRef(Py_None);
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

/* Read once and deliver. False when there was nothing to read, or when the connection has ended, which `ended` was
 * called for. */
static PyObject *reader_readable(Reader *self, PyObject *Py_UNUSED(ignored)) {
    if (self->closed) Py_RETURN_FALSE;
    char *into =
        self->opened.apply ? self->sealed + self->sealed_filled : PyByteArray_AS_STRING(self->buffer) + self->filled;
    Py_ssize_t room = self->opened.apply ? SEALED_NBYTES - self->sealed_filled : self->capacity - self->filled;
    if (self->opened.apply && room > RECEIVE_MOST) room = RECEIVE_MOST;
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
    return self->opened.apply ? reader_open(self, self->sealed_filled + received)
                         : reader_deliver(self, self->filled + received);
}
/* Deliver the whole frames in the first `end` bytes of the buffer. False when the connection has ended. */
static PyObject *reader_deliver(Reader *self, Py_ssize_t end) {
    unsigned char *data = (unsigned char *)PyByteArray_AS_STRING(self->buffer);
    Py_ssize_t done;
    Py_INCREF(self);
    while ((done = whole_frames(self, data, end)) > 0) {
        int failed;
        if (self->wire) failed = wire_batch(self->wire, self->view, data, done);
        else {
            PyObject *part = PySequence_GetSlice(self->view, 0, done),
                     *taken = part ? PyObject_CallOneArg(self->deliver, part) : NULL;
            failed = !taken;
            Py_XDECREF(taken);
            Py_XDECREF(part);
        }
        if (failed) {
            done = -1;
            break;
        }
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
    } else answer = PyBool_FromLong(!self->closed);
    Py_DECREF(self);
    return answer;
}
/* Deliver frames, or parts of them, which others have received. False when the connection has ended. */
static PyObject *reader_feed(Reader *self, PyObject *plain) {
    Py_ssize_t size = PyBytes_GET_SIZE(plain);
    PyObject *answer = PyBool_FromLong(!self->closed);
    for (Py_ssize_t at = 0, n; at < size && answer == Py_True; at += n) {
        n = self->capacity - self->filled; /* at least 1, as the remaining bytes are fewer than the largest frame */
        if (n > size - at) n = size - at;
        memcpy(PyByteArray_AS_STRING(self->buffer) + self->filled, PyBytes_AS_STRING(plain) + at, (size_t)n);
        Py_SETREF(answer, reader_deliver(self, self->filled + n));
    }
    return answer;
}
static PyObject *reader_feed_bytes(Reader *self, PyObject *plain) {
    if (!PyBytes_CheckExact(plain))
        return PyErr_Format(PyExc_TypeError, "bytes are needed, not %.80s", Py_TYPE(plain)->tp_name);
    Py_INCREF(self);
    PyObject *answer = reader_feed(self, plain);
    Py_DECREF(self);
    return answer;
}
/* Decrypt the record at `at`, of `end` bytes of records: 1 done, 0 the record is incomplete, -1 with an exception. */
static int reader_next_record(Reader *self, Py_ssize_t at, Py_ssize_t end, PyObject **plain) {
    if (end - at < RECORD_HEAD) return 0;
    uint32_t nbytes = GET(uint32_t, self->sealed + at);
    if (nbytes == 0 || nbytes > RECORD_MOST) {
        PyErr_Format(self->state->protocol_error, "the peer announced a record of %lu bytes; 1 to %d are allowed",
                     (unsigned long)nbytes, RECORD_MOST);
        return -1;
    }
    Py_ssize_t size = (Py_ssize_t)nbytes + RECORD_TAG;
    if (size > end - at - RECORD_HEAD) return 0;
    PyObject *text = PyBytes_FromStringAndSize(self->sealed + at + RECORD_HEAD, size);
    if (!text) return -1;
    *plain = seal_apply(self->state, &self->opened, text, nbytes);
    Py_DECREF(text);
    if (*plain) return 1;
    if (PyErr_ExceptionMatches(self->invalid))
        PyErr_Format(self->state->protocol_error,
                     "record %llu from the peer does not open: somebody forged, changed, repeated or dropped one",
                     (unsigned long long)self->opened.count - 1);
    return -1;
}
/* Decrypt and deliver the whole records in the first `end` bytes. False when the connection has ended. */
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
/* Read and deliver nothing from here on. */
static PyObject *reader_close(Reader *self, PyObject *Py_UNUSED(ignored)) {
    self->closed = 1;
    Py_RETURN_NONE;
}
static PyMethodDef reader_methods[] = {{"readable", (PyCFunction)reader_readable, METH_NOARGS,
                                        "Read once and deliver; False when there was nothing, or it ended."},
                                       {"feed", (PyCFunction)reader_feed_bytes, METH_O,
                                        "Deliver bytes that others have received; False when it ended."},
                                       {"close", (PyCFunction)reader_close, METH_NOARGS, "Read nothing more."},
                                       {NULL, NULL, 0, NULL}};
static PyType_Slot reader_slots[] = {{Py_tp_new, reader_new},
                                     {Py_tp_dealloc, reader_dealloc},
                                     {Py_tp_traverse, reader_traverse},
                                     {Py_tp_clear, reader_clear},
                                     {Py_tp_methods, reader_methods},
                                     {Py_tp_doc, (char *)"Frames from a socket: Reader(fd, capacity, max_frame, wire, "
                                                         "deliver, ended), and decrypt, records opened before, the "
                                                         "record of the next key, turn, and what decrypt "
                                                         "raises where they are sealed."},
                                     {0, NULL}};
PyType_Spec reader_spec = {.name = "zcactor.native._hot.Reader",
                           .basicsize = sizeof(Reader),
                           .slots = reader_slots,
                           .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_HAVE_GC};
