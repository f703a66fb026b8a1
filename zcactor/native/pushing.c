/* Values for other processes than the caller's: PUSH and FORWARD frames of promises, groups and graphs; see
 * zcactor/objects/pushes.py. */
#include "hot.h"

/* Begin a PUSH frame of a key and a word: 1 its values are still missing, 0 frames wait and it must go the other way, -1
 * an exception. */
static int begin_push(Wire *self, Frame *frame, PyObject *key, PyObject *word) {
    if (!wire_is_whole(self)) return -1;
    const int waits = has_backlog(self);
    if (waits) return waits < 0 ? -1 : 0;
    frame->kind = KIND_PUSH;
    frame->array = 0;
    frame->actor = 0;
    frame->code = STATUS_OK;
    frame->id = PyLong_AsUnsignedLongLong(key);
    frame->extra = PyErr_Occurred() ? 0 : PyLong_AsUnsignedLongLong(word);
    frame->table = frame->key = frame->call = NULL;
    frame->whole = 0;
    frame->shared = NULL;
    return PyErr_Occurred() ? -1 : 1;
}
/* push(key, word, value, more): whether the outcome of another process's promise, or the value of a graph's node, was
 * sent. False: it must go the other way, and nothing was sent. With `more` it is flushed in the loop's next turn; with
 * None for it by the caller, who flushes several connections one after the other. */
PyObject *wire_push(Wire *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 3 && nargs != 4) {
        PyErr_SetString(PyExc_TypeError, "push(key, word, value, more)");
        return NULL;
    }
    Frame frame;
    int begun = begin_push(self, &frame, args[0], args[1]);
    if (begun <= 0) return begun < 0 ? NULL : Py_NewRef(Py_False);
    frame.values = args + 2;
    frame.count = 1;
    int written = write_frame(self, &frame);
    if (written < 0) return NULL;
    if (written != WRITTEN) Py_RETURN_FALSE;
    self->counters->pushes++;
    if (nargs == 4 && args[3] == Py_True) {
        if (wire_schedule_flush(self) < 0) return NULL;
    } else if ((nargs != 4 || args[3] != Py_None) && wire_flush(self) < 0)
        return NULL;
    Py_RETURN_TRUE;
}
/* pass_on(id, value, more, pushed, to, key, word): push the result of a call by the Wire `to`, then answer the call by
 * this one. An array is shared once for both. False: nothing was sent; None: it was pushed, and Python must answer. */
PyObject *wire_pass_on(Wire *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 7 || Py_TYPE(args[4]) != self->state->wire_type) {
        PyErr_SetString(PyExc_TypeError, "pass_on(id, value, more, pushed, to, key, word)");
        return NULL;
    }
    uint64_t pushed = PyLong_AsUnsignedLongLong(args[3]);
    if (pushed == UINT64_MAX && PyErr_Occurred()) return NULL;
    Wire *to = (Wire *)args[4];
    Frame frame;
    Shared shared = {NULL, NULL, 0};
    int begun = begin_push(to, &frame, args[5], args[6]);
    if (begun <= 0) return begun < 0 ? NULL : Py_NewRef(Py_False);
    frame.values = args + 1;
    frame.count = 1;
    frame.shared = &shared;
    int written = write_frame(to, &frame);
    PyObject *answered = NULL;
    if (written == WRITTEN) {
        to->counters->pushes++;
        if (wire_flush(to) == 0)
            answered = wire_respond_with(self, args[0], args + 1, args[2] == Py_True, pushed, 1, &shared);
        if (answered == Py_False) answered = (Py_DECREF(answered), Py_NewRef(Py_None));
    } else if (written >= 0) answered = Py_NewRef(Py_False);
    Py_XDECREF(shared.block);
    return answered;
}
/* publish(key, word, values, whole): send the values of a tuple to the taker of `word`, in a PUSH frame. With `whole`
 * arrays travel in the frame and are not shared. Publications of a batch are sent at its end, as answers are. False:
 * they must go the other way, and nothing was sent. */
PyObject *wire_publish(Wire *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 4 || !PyTuple_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "publish(key, word, values, whole)");
        return NULL;
    }
    Frame frame;
    int begun = begin_push(self, &frame, args[0], args[1]);
    if (begun <= 0) return begun < 0 ? NULL : Py_NewRef(Py_False);
    frame.array = 1;
    frame.values = ((PyTupleObject *)args[2])->ob_item;
    frame.count = PyTuple_GET_SIZE(args[2]);
    frame.whole = args[3] == Py_True;
    int written = write_frame(self, &frame);
    if (written < 0) return NULL;
    if (written != WRITTEN) Py_RETURN_FALSE;
    if (self->feeding && PyThread_get_thread_ident() == self->thread) {
        if (++self->unflushed < ANSWERS_PER_FLUSH) Py_RETURN_TRUE;
        self->unflushed = 0;
    }
    if (wire_flush(self) < 0) return NULL;
    Py_RETURN_TRUE;
}
/* forward(id, number, key, target): write a FORWARD frame, which is sent then. False: Python must write it. */
PyObject *wire_forward(Wire *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 4) {
        PyErr_SetString(PyExc_TypeError, "forward(id, number, key, target)");
        return NULL;
    }
    if (!wire_is_whole(self)) return NULL;
    int waits = has_backlog(self);
    if (waits || self->credits->available <= 0) return waits < 0 ? NULL : Py_NewRef(Py_False);
    PyObject *zero = PyLong_FromLong(0), *kind = PyLong_FromLong(KIND_FORWARD), *written = NULL;
    if (zero && kind) {
        self->credits->available--;
        written = wire_frame(self, (PyObject *[]){kind, zero, args[1], zero, args[0], args[2], args[3]}, 7);
        if (written != Py_True) self->credits->available++;
    }
    Py_XDECREF(kind);
    Py_XDECREF(zero);
    if (written == Py_True && wire_schedule_flush(self) < 0) Py_CLEAR(written);
    return written;
}
