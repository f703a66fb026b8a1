/* Calls that have arrived: they go to their actors, or wait on the shelf for the promise among their arguments; see
 * zcactor/rpc/shelf.py. */
#include "hot.h"

/* Let go of the references of a call. */
void arrived_clear(Arrived *call) {
    Py_CLEAR(call->list);
    Py_CLEAR(call->forwards);
    Py_CLEAR(call->label);
}
/* Call host.receive_plain(session, id, code, timeout_ns, arguments), or receive_linked(the same, forwards) for a
 * call with promises or FORWARD frames. Without a host call on_call(actor, id, code, timeout_ns, arguments). The
 * call is handed over, so that no reference of this function keeps an argument alive. 0, or -1 with an exception. */
int deliver(Wire *self, Arrived *call) {
    PyObject *id = PyLong_FromUnsignedLongLong(call->id), *done = NULL, *host = NULL, *session = self->given[SESSION],
             *on_call = self->given[ON_CALL];
    PyObject *actor = PyLong_FromUnsignedLong(call->actor), *code = PyLong_FromLong(call->code),
             *timeout = PyLong_FromUnsignedLongLong(call->timeout);
    int twice = id && actor && code && timeout ? PyDict_Contains(self->given[OPEN], id) : -1;
    if (twice > 0) PyErr_Format(self->state->protocol_error, "the peer opened call %S twice", id);
    if (!twice) host = Py_XNewRef(PyDict_GetItemWithError(self->given[HOSTS], actor));
    if (!twice && !PyErr_Occurred()) {
        PyObject *list = call->list, *forwards = call->forwards ? call->forwards : Py_None;
        PyObject *stack[7] = {host, session, id, code, timeout, list, forwards};
        Py_INCREF(session);
        call->list = NULL;
        if (host && (call->forwards || call->linked))
            done = PyObject_VectorcallMethod(self->state->str_receive_linked, stack, 7, NULL);
        else if (host) done = PyObject_VectorcallMethod(self->state->str_receive_plain, stack, 6, NULL);
        else {
            PyObject *others[6] = {NULL, actor, id, code, timeout, list};
            Py_INCREF(on_call);
            done = PyObject_Vectorcall(on_call, others + 1, 5 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
            Py_DECREF(on_call);
        }
        Py_DECREF(session);
        Py_DECREF(list);
    }
    arrived_clear(call);
    Py_XDECREF(host);
    Py_XDECREF(timeout);
    Py_XDECREF(code);
    Py_XDECREF(actor);
    Py_XDECREF(id);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* The word of the peer's process in PUSH frames, as zcactor.rpc.messages.owner_word. */
static PyObject *peer_word(const Wire *self) { return PyLong_FromUnsignedLongLong(GET(uint64_t, self->peer)); }

/* Whether the session has one connection, which is open; -1 with an exception. */
static int is_alone(Wire *self) {
    PyObject *session = self->given[SESSION];
    int is = is_attr(session, self->state->str_closed, Py_None);
    if (is > 0) is = is_attr(session, self->state->str_twin, Py_None);
    if (is > 0) is = is_attr(session, self->state->str_successor, Py_None);
    return is;
}
/* Keep a call until its promise is here, or until the next batch: 1 done, and the call is handed over; 0 it has to go to
 * its actor at once; -1 an exception, and the call was let go of. */
int shelve(Wire *self, Arrived *call, PyObject *id) {
    PyObject *shelf = self->given[SHELF], *word = NULL;
    int can = !call->timeout && !self->shelved.list ? is_attr(shelf, self->state->str_open, Py_True) : 0;
    if (can > 0) can = is_alone(self);
    if (can > 0) { /* Python refuses a call that is opened twice, or to an actor that is not here */
        PyObject *actor = PyLong_FromUnsignedLong(call->actor);
        int twice = PyDict_Contains(self->given[OPEN], id),
            hosted = actor ? PyDict_Contains(self->given[HOSTS], actor) : -1;
        Py_XDECREF(actor);
        can = twice < 0 || hosted < 0 ? -1 : !twice && hosted;
    }
    if (can > 0) {
        word = peer_word(self);
        int there = word ? PyDict_Contains(shelf, word) : -1;
        can = there < 0 ? -1 : !there;
    }
    if (can > 0 && PyDict_SetItem(shelf, word, (PyObject *)self) < 0) can = -1;
    Py_XDECREF(word);
    if (can > 0) {
        self->shelved = *call;
        *call = (Arrived){0};
    } else if (can < 0) arrived_clear(call);
    return can;
}
/* Take the shelved call off the shelf, for the caller: 0, or -1 with an exception. */
static int take(Wire *self, Arrived *call) {
    PyObject *shelf = self->given[SHELF], *word = peer_word(self);
    *call = self->shelved;
    self->shelved = (Arrived){0};
    int there = word ? PyDict_GetItemWithError(shelf, word) == (PyObject *)self : 0;
    int failed = PyErr_Occurred() || (there && PyDict_DelItem(shelf, word) < 0);
    Py_XDECREF(word);
    if (failed) arrived_clear(call);
    return failed ? -1 : 0;
}
/* Give the shelved call to its actor, with what on_argument(id, key, label) makes for the promise. Where the connection
 * has ended, drop it: its caller has been told. 0, or -1 with an exception. */
int shelf_take_down(Wire *self) {
    Arrived call;
    if (!self->shelved.list) return 0;
    int open = take(self, &call) < 0 ? -1 : is_attr(self->given[SESSION], self->state->str_closed, Py_None);
    PyObject *argument =
        open > 0 ? PyObject_CallFunction(self->given[ON_ARGUMENT], "KKO", (unsigned long long)call.promise,
                                         (unsigned long long)call.key, call.label)
                 : NULL;
    if (!argument || PyList_SetItem(call.list, call.place, argument) < 0) {
        arrived_clear(&call);
        return open ? -1 : 0;
    }
    return deliver(self, &call);
}
/* Give the lease on a promise back with the next frame, or after a while, as Session.release_later. */
static int release_later(Wire *self, uint64_t id) {
    PyObject *session = self->given[SESSION];
    int due = is_attr(session, self->state->str_release_delayed, Py_True);
    if (due) return due < 0 ? -1 : wire_note_release(self, id);
    PyObject *done = PyObject_CallMethod(session, "release_later", "K", (unsigned long long)id);
    Py_XDECREF(done);
    return done ? 0 : -1;
}
/* Give a value that was pushed by `self` to the shelved call that waits for it: 1 done, 0 no such call is shelved, -1 an
 * exception. */
int shelf_take_push(Wire *self, PyObject *word, uint64_t key, PyObject *value) {
    PyObject *found = PyDict_GetItemWithError(self->given[SHELF], word);
    if (!found || Py_TYPE(found) != self->state->wire_type) return PyErr_Occurred() ? -1 : 0;
    Wire *waits = (Wire *)Py_NewRef(found);
    int taken = wire_is_whole(waits) ? waits->shelved.list && waits->shelved.key == key : -1;
    if (taken > 0 && (taken = is_alone(waits)) == 0 && shelf_take_down(waits) < 0) taken = -1; /* Python takes it */
    Arrived call;
    if (taken > 0 && (!waits->shelved.list || take(waits, &call) < 0)) taken = PyErr_Occurred() ? -1 : 0;
    if (taken > 0) {
        call.linked = 0;
        if (release_later(waits, call.promise) < 0 ||
            PyList_SetItem(call.list, call.place, Py_NewRef(value)) < 0) {
            arrived_clear(&call);
            taken = -1;
        } else if (deliver(waits, &call) < 0) taken = -1;
    }
    Py_DECREF(waits);
    return taken;
}
PyObject *wire_take_down(Wire *self, PyObject *Py_UNUSED(ignored)) {
    if (!wire_is_whole(self) || shelf_take_down(self) < 0) return NULL;
    Py_RETURN_NONE;
}
