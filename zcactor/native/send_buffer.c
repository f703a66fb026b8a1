/* SendBuffer: the frames that are written and not sent yet, on a socket, with encrypted records where there is a key; or
 * on slots, whose owner sends them in Python: a zcactor.transport.verbs.peer.sending.SlotSender, or a
 * zcactor.transport.stream.slots.Slots. */
#include "hot.h"

static int buffer_traverse(SendBuffer *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->module);
    /* Not the slot: before Python 3.12 a memoryview that is cleared while it is exported crashes. It is in no cycle. */
    Py_VISIT(self->slots);
    Py_VISIT(self->sealed.apply);
    Py_VISIT(self->sealed.turn);
    Py_VISIT(self->refused);
    return 0;
}
/* Write nothing to the slot any more. */
static void buffer_leave_slot(SendBuffer *self) {
    Py_buffer left = self->slot;
    memset(&self->slot, 0, sizeof self->slot);
    if (left.obj) PyBuffer_Release(&left);
}
static int buffer_clear(SendBuffer *self) {
    self->closed = self->blocked = 1;
    self->head = self->tail = 0;
    if (self->on_slots) {
        self->data = NULL;
        self->room = 0;
    }
    buffer_leave_slot(self);
    Py_CLEAR(self->slots);
    direction_clear(&self->sealed);
    return 0;
}
static void buffer_dealloc(SendBuffer *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    buffer_clear(self);
    if (!self->on_slots) PyMem_Free(self->data);
    Py_XDECREF(self->record);
    Py_XDECREF(self->scratch);
    Py_XDECREF(self->refused);
    Py_DECREF(self->module);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}
static PyObject *buffer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    Py_ssize_t max_reserve;
    int fd;
    PyObject *slots = NULL, *encrypt = NULL, *turn = NULL;
    unsigned long long count = 0, until = 0;
    State *state;
    PyObject *module = module_of(type, &state);
    if (!module) return NULL;
    if (kwargs && PyDict_GET_SIZE(kwargs)) return PyErr_Format(PyExc_TypeError, "SendBuffer takes no keywords");
    if (!PyArg_ParseTuple(args, "ni|OOKKO", &max_reserve, &fd, &slots, &encrypt, &count, &until, &turn)) return NULL;
    if (encrypt && !turn) return PyErr_Format(PyExc_TypeError, "encrypt comes with count, until and turn");
    SendBuffer *self = (SendBuffer *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->module = Py_NewRef(module);
    self->state = state;
    self->max_reserve = max_reserve;
    self->fd = fd;
    if (slots != Py_None) self->slots = Py_XNewRef(slots);
    self->on_slots = self->slots != NULL;
    if (!self->on_slots) {
        self->room = 4096;
        self->data = PyMem_Malloc((size_t)self->room);
    }
    self->scratch = PyByteArray_FromStringAndSize(NULL, max_reserve);
    int keyed = !encrypt || direction_init(&self->sealed, encrypt, turn, count, until) == 0;
    if (keyed && self->scratch && (self->data || self->on_slots)) return (PyObject *)self;
    if (!PyErr_Occurred()) PyErr_NoMemory();
    Py_DECREF(self);
    return NULL;
}
/* Reserve room for n bytes at the tail. NULL with an exception. On slots it may run Python. */
char *buffer_room(SendBuffer *self, Py_ssize_t n) {
    if (self->on_slots) {
        while (n > self->room - self->tail) { /* once, unless another thread fills the new slot meanwhile */
            PyObject *slots = Py_XNewRef(self->slots), *done;
            if (!slots) {
                PyErr_SetObject(self->state->connection_lost, self->refused);
                return NULL;
            }
            done = n > self->max_reserve ? PyErr_Format(PyExc_ValueError, "a frame of %zd bytes", n)
                                         : PyObject_CallMethodNoArgs(slots, self->state->str_full);
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
            if (!data) {
                PyErr_NoMemory();
                return NULL;
            }
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
        return PyErr_Format(
            PyExc_ValueError,
            "a frame of %zd bytes with its prefix is too large: the limit is %zd; pass large values by reference", n,
            self->max_reserve);
    if (self->refused) {
        PyErr_SetObject(self->state->connection_lost, self->refused);
        return NULL;
    }
    return Py_BuildValue("Oi", self->scratch, 0);
}
static PyObject *buffer_commit(SendBuffer *self, PyObject *arg) {
    Py_ssize_t n = PyLong_AsSsize_t(arg);
    if (n == -1 && PyErr_Occurred()) return NULL;
    if (n < 0 || n > PyByteArray_GET_SIZE(self->scratch))
        return PyErr_Format(PyExc_ValueError, "commit of %zd bytes", n);
    char *to = buffer_room(self, n); /* the caller's lock keeps other writers from the scratch buffer meanwhile */
    if (!to) return NULL;
    if (self->closed) {
        PyErr_SetObject(self->state->connection_lost, self->refused);
        return NULL;
    }
    memcpy(to, PyByteArray_AS_STRING(self->scratch), (size_t)n);
    self->tail += n;
    self->committed++;
    Py_RETURN_NONE;
}
/* Make the next record: 0 done, or the buffer was closed meanwhile; -1 with an exception. Other threads may write
 * meanwhile. */
static int buffer_seal(SendBuffer *self) {
    Py_ssize_t n = self->tail - self->head;
    if (n > RECORD_MOST) n = RECORD_MOST;
    PyObject *plain = PyBytes_FromStringAndSize(self->data + self->head, n);
    if (!plain) return -1;
    self->head += n;
    if (self->head == self->tail) self->head = self->tail = 0;
    PyObject *record = seal_apply(self->state, &self->sealed, plain, (uint32_t)n);
    Py_DECREF(plain);
    if (!record) return -1;
    if (self->closed) Py_DECREF(record);
    else self->record = record;
    self->sent = 0;
    return 0;
}
/* Handle a send that took nothing: 0 try again, 1 the socket is full, -1 an exception is set. */
static int send_refused(void) {
    if (errno == EINTR) return 0;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return 1;
    PyErr_SetFromErrno(PyExc_OSError);
    return -1;
}
/* Send the rest of the record: 0 all sent, 1 the socket is full, -1 an exception is set. */
static int buffer_send_record(SendBuffer *self) {
    int refused;
    Py_ssize_t size = PyBytes_GET_SIZE(self->record);
    char header[RECORD_HEAD];
    PUT(uint32_t, header, size - RECORD_TAG);
    while (self->sent < size + RECORD_HEAD) {
        Py_ssize_t at = self->sent < RECORD_HEAD ? 0 : self->sent - RECORD_HEAD,
                   led = self->sent < RECORD_HEAD ? self->sent : RECORD_HEAD;
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
/* Send all bytes: 0 all sent, 1 the socket is full, -1 an exception is set. */
static int buffer_drain(SendBuffer *self) {
    int refused;
    if (self->sealed.apply) return buffer_drain_sealed(self);
    if (self->on_slots) {
        PyObject *slots = Py_XNewRef(self->slots),
                 *left = slots ? PyObject_CallMethodNoArgs(slots, self->state->str_flush) : Py_NewRef(Py_None);
        Py_XDECREF(slots);
        Py_XDECREF(left);
        return left ? left == Py_True : -1;
    }
    while (!self->closed && self->head < self->tail) {
        ssize_t sent =
            send(self->fd, self->data + self->head, (size_t)(self->tail - self->head), MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent >= 0) self->head += sent;
        else if ((refused = send_refused()) != 0) return refused;
    }
    self->head = self->tail = 0;
    return 0;
}
/* Send all bytes, and note whether the socket is full, unless the buffer was closed meanwhile. */
int buffer_send(SendBuffer *self) {
    int left = buffer_drain(self);
    if (left >= 0 && !self->closed) self->blocked = left;
    return self->closed && left > 0 ? 0 : left;
}
static PyObject *buffer_flush(SendBuffer *self, PyObject *Py_UNUSED(ignored)) {
    if (buffer_idle(self)) Py_RETURN_FALSE;
    int left = buffer_send(self);
    return left < 0 ? NULL : PyBool_FromLong(left);
}
static PyObject *buffer_resume(SendBuffer *self, PyObject *Py_UNUSED(ignored)) {
    int left = self->closed || self->ended ? 0 : buffer_send(self);
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
    self->fd = -1; /* its number may be used again: no thread may send to it */
    if (self->on_slots) {
        self->data = NULL;
        self->room = 0;
    }
    Py_CLEAR(self->record);
    buffer_leave_slot(self);
    Py_CLEAR(self->slots); /* which refers to this buffer */
    Py_RETURN_NONE;
}
/* The frames that were written and not sent, where the peer had hung up; None where some of them may have been sent. */
static PyObject *buffer_unsent(SendBuffer *self, PyObject *Py_UNUSED(ignored)) {
    if (!self->ended || self->closed) Py_RETURN_NONE;
    return PyBytes_FromStringAndSize(self->data + self->head, self->tail - self->head);
}
/* swap(view, tail): write to another slot from now on, from `tail`. Returns the end of the frames in the former
 * slot. */
static PyObject *buffer_swap(SendBuffer *self, PyObject *const *args, Py_ssize_t nargs) {
    Py_buffer view;
    Py_ssize_t tail = nargs == 2 ? PyLong_AsSsize_t(args[1]) : -1;
    if (tail < 0 || !self->on_slots) return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "swap(view, tail)");
    if (PyObject_GetBuffer(args[0], &view, PyBUF_WRITABLE) < 0) return NULL;
    if (self->closed ||
        tail > view.len) { /* closed: the former slot has no frames, and this one gets none */
        PyBuffer_Release(&view);
        return self->closed
                   ? PyLong_FromLong(0)
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
/* leave(view, frames): where there are frames in the slot append them to `frames`, and write to `view` from now on. Whether
 * that was done. In one step, as a signal's handler may raise after any step of Python's. */
static PyObject *buffer_leave(SendBuffer *self, PyObject *const *args, Py_ssize_t nargs) {
    Py_buffer view;
    if (nargs != 2 || !self->on_slots) return PyErr_Format(PyExc_TypeError, "leave(view, frames)");
    for (;;) {
        const Py_ssize_t end = self->tail;
        PyObject *slot = self->slot.obj;
        if (self->closed || self->head == end || !slot) Py_RETURN_FALSE;
        Py_INCREF(slot); /* the collector may run other code meanwhile, which closes this buffer */
        PyObject *whole = PyMemoryView_FromObject(slot), *part = whole ? PySequence_GetSlice(whole, 0, end) : NULL;
        const int same = !self->closed && self->slot.obj == slot && self->tail == end;
        Py_DECREF(slot);
        Py_XDECREF(whole);
        if (!part) return NULL;
        if (!same) {
            Py_DECREF(part);
            continue;
        }
        if (PyObject_GetBuffer(args[0], &view, PyBUF_WRITABLE) < 0) {
            Py_DECREF(part);
            return NULL;
        }
        PyObject *done = PyObject_CallMethodOneArg(args[1], self->state->str_append, part); /* of a deque: no Python */
        Py_DECREF(part);
        if (!done) {
            PyBuffer_Release(&view);
            return NULL;
        }
        Py_DECREF(done);
        Py_buffer left = self->slot;
        self->slot = view;
        self->data = view.buf;
        self->room = view.len;
        self->head = self->tail = 0;
        PyBuffer_Release(&left);
        Py_RETURN_TRUE;
    }
}
static PyObject *buffer_pending(SendBuffer *self, void *Py_UNUSED(closure)) {
    return PyLong_FromSsize_t(self->tail - self->head +
                              (self->record || self->sealing)); /* for an encrypted record only whether it is there */
}
static PyMethodDef buffer_methods[] = {
    {"reserve", (PyCFunction)buffer_reserve, METH_O, "Room for one frame: a buffer and the offset in it."},
    {"commit", (PyCFunction)buffer_commit, METH_O, "The first bytes of the last reservation are to be sent."},
    {"flush", (PyCFunction)buffer_flush, METH_NOARGS,
     "Send what is committed; True when the socket is full from now on."},
    {"resume", (PyCFunction)buffer_resume, METH_NOARGS, "Go on sending; True when nothing is left."},
    {"refuse", (PyCFunction)buffer_refuse, METH_O, "Accept nothing more, and say why."},
    {"close", (PyCFunction)buffer_close, METH_O, "Accept nothing more and drop what was not sent."},
    {"unsent", (PyCFunction)buffer_unsent, METH_NOARGS,
     "The frames that stay, where the peer had hung up before they could be sent; otherwise None."},
    {"swap", (PyCFunction)(void (*)(void))buffer_swap, METH_FASTCALL,
     "Write to another slot; where the frames in this one end."},
    {"leave", (PyCFunction)(void (*)(void))buffer_leave, METH_FASTCALL,
     "Append the frames in the slot to a deque, and write to another one; whether there were any."},
    {NULL, NULL, 0, NULL}};
static PyGetSetDef buffer_getset[] = {{"pending", (getter)buffer_pending, NULL,
                                       "Bytes committed and not sent; on slots those of the present one.", NULL},
                                      {NULL, NULL, NULL, NULL, NULL}};
static PyMemberDef buffer_members[] = {
    {"declines", T_BOOL, offsetof(SendBuffer, declines), 0,
     "Whether its Wire leaves all frames to Python: simulations and tests set it, for the paths of rare frames."},
    {"committed", T_ULONGLONG, offsetof(SendBuffer, committed), READONLY, "The frames that were committed so far."},
    {NULL, 0, 0, 0, NULL}};
static PyType_Slot send_buffer_slots[] = {
    {Py_tp_new, buffer_new},
    {Py_tp_dealloc, buffer_dealloc},
    {Py_tp_traverse, buffer_traverse},
    {Py_tp_clear, buffer_clear},
    {Py_tp_methods, buffer_methods},
    {Py_tp_getset, buffer_getset},
    {Py_tp_members, buffer_members},
    {Py_tp_doc, (char *)"The frames that are written and not sent yet, for a socket: SendBuffer(max_reserve, fd); on "
                        "slots: SendBuffer(max_reserve, -1, slots); sealed: SendBuffer(max_reserve, fd, None, encrypt, "
                        "records made before, the record of the next key, turn)."},
    {0, NULL}};
PyType_Spec send_buffer_spec = {.name = "zcactor.native._hot.SendBuffer",
                                .basicsize = sizeof(SendBuffer),
                                .slots = send_buffer_slots,
                                .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_HAVE_GC};
