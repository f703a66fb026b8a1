/* Wire: the plain frames of one session. It sends its calls, answers and releases of leases. */
#include "hot.h"
#include <poll.h>
#include <time.h>

static const char *const given_names[NGIVEN] = {
    "call",   "frame",   "batch",          "stopped",  "push",  "argument", "forward", "lease", "share",    "schedule_flush",
    "leases", "pending", "open",           "backlog",  "hosts", "session",  "loop",    "takers", "ahead",
    "announced_type",    "ref_type",       "block_type", "store", "codes",   "dtypes"};

static int wire_traverse(Wire *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->module);
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
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    wire_clear(self);
    Py_XDECREF(self->credits);
    Py_XDECREF(self->counters);
    PyMem_Free(self->released);
    Py_DECREF(self->module);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}
static PyObject *wire_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *process, *peer, *out, *credits, *counters, *callbacks, *given;
    unsigned long long arena;
    Py_ssize_t eager_limit, max_frame;
    static char *names[] = {"out",         "credits",   "counters",     "process", "peer",
                            "eager_limit", "max_frame", "arena_nbytes", "callbacks", "given", NULL};
    State *state;
    PyObject *module = module_of(type, &state);
    if (!module) return NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!O!SSnnKOO!", names, state->send_buffer_type, &out,
                                     state->credits_type, &credits, state->counters_type, &counters, &process, &peer,
                                     &eager_limit, &max_frame, &arena, &callbacks, &PyDict_Type, &given))
        return NULL;
    if (PyBytes_GET_SIZE(process) != 16 || PyBytes_GET_SIZE(peer) != 16)
        return PyErr_Format(PyExc_ValueError, "a process's name has 16 bytes");
    if (PyDict_GET_SIZE(given) != NGIVEN - NCALLBACKS)
        return PyErr_Format(PyExc_TypeError, "Wire needs %d things and nothing else", NGIVEN - NCALLBACKS);
    Wire *self = (Wire *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->module = Py_NewRef(module);
    self->state = state;
    for (int i = 0; i < NGIVEN; i++) {
        PyObject *value = i < NCALLBACKS ? PyObject_GetAttrString(callbacks, given_names[i])
                                         : Py_XNewRef(PyDict_GetItemString(given, given_names[i]));
        int is_dict =
            i == PENDING || i == OPEN || i == HOSTS || i == CODES || i == DTYPES || i == AHEAD || i == TAKERS;
        self->given[i] = value;
        if (!value || (is_dict && !PyDict_Check(value))) {
            if (!PyErr_Occurred())
                PyErr_Format(PyExc_TypeError, "Wire needs %s%s", given_names[i], value ? " as a dict" : "");
            Py_DECREF(self);
            return NULL;
        }
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
/* Whether `self` has all its parts, otherwise with an exception. The garbage collector may have cleared them in a
 * cycle. */
int wire_is_whole(const Wire *self) {
    if (self->out) return 1;
    PyErr_SetString(PyExc_RuntimeError, "this Wire is being collected");
    return 0;
}

/* The time by which wires note when they heard of their peers. A few ms late, and free of a system call. */
long long wire_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    return (long long)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}
/* Where the loop did other things for long, look whether the peer has hung up meanwhile. It has not read then what
 * would be sent, and the system may take that all the same. */
void wire_look(Wire *self) {
    SendBuffer *out = self->out;
    if (!self->behind_after || wire_now() - self->heard <= self->behind_after) return;
    if (!out || out->on_slots || out->closed || out->blocked || out->record || out->sealing || out->head) return;
    struct pollfd found = {.fd = out->fd, .events = POLLRDHUP};
    if (poll(&found, 1, 0) > 0) out->ended = 1;
}
static PyObject *wire_look_now(Wire *self, PyObject *Py_UNUSED(ignored)) {
    wire_look(self);
    Py_RETURN_NONE;
}

/* Send all written frames. Python handles errors. */
int wire_flush(Wire *self) {
    SendBuffer *out = self->out;
    if (buffer_idle(out)) return 0;
    wire_look(self);
    if (out->ended) return 0;
    int left = buffer_send(out);
    if (left == 0) return 0;
    PyObject *done;
    if (left > 0) done = PyObject_CallOneArg(self->given[STOPPED], Py_None);
    else { /* it raises again what is the caller's */
        PyObject *type, *error, *traceback;
        PyErr_Fetch(&type, &error, &traceback);
        PyErr_NormalizeException(&type, &error, &traceback);
        if (traceback) PyException_SetTraceback(error, traceback);
        done = PyObject_CallOneArg(self->given[STOPPED], error);
        Py_XDECREF(type);
        Py_XDECREF(error);
        Py_XDECREF(traceback);
    }
    Py_XDECREF(done);
    return done ? 0 : -1;
}
int wire_schedule_flush(Wire *self) {
    if (self->flush_scheduled) return 0;
    self->flush_scheduled = 1;
    PyObject *done = NULL;
    if (PyThread_get_thread_ident() == self->thread) {
        PyObject *flush = PyObject_GetAttr((PyObject *)self, self->state->str_flush_due);
        done = flush ? PyObject_CallMethodOneArg(self->given[LOOP], self->state->str_call_soon, flush) : NULL;
        Py_XDECREF(flush);
        if (!done) {
            if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) {
                self->flush_scheduled = 0;
                return -1;
            }
            PyErr_Clear(); /* the loop is closed, and Python ends the session */
        }
    }
    if (!done && !(done = PyObject_CallNoArgs(self->given[SCHEDULE_FLUSH]))) self->flush_scheduled = 0;
    Py_XDECREF(done);
    return done ? 0 : -1;
}
static PyObject *wire_next_id(Wire *self, PyObject *Py_UNUSED(ignored)) {
    return PyLong_FromUnsignedLongLong(++self->next_id);
}

/* Remove a call that was not sent from the pending ones: 1 done, 0 it was removed already, -1 an exception. An
 * exception that is set stays set. */
static int take_back(Wire *self, PyObject *call, PyObject *id) {
    PyObject *type, *error, *traceback, *pending = self->given[PENDING];
    PyErr_Fetch(&type, &error, &traceback);
    PyObject *entry = PyDict_GetItemWithError(pending, id);
    int ours = entry == call;
    int failed = (!entry && PyErr_Occurred()) || (ours && PyDict_DelItem(pending, id) < 0);
    int sent =
        failed ? -1 : is_attr(call, self->state->str_state, self->state->state_sent); /* it may have ended meanwhile */
    if (sent > 0) sent = PyObject_SetAttr(call, self->state->str_state, self->state->state_queued);
    if (sent < 0) {
        Py_XDECREF(type);
        Py_XDECREF(error);
        Py_XDECREF(traceback);
        return -1;
    }
    PyErr_Restore(type, error, traceback);
    return ours;
}
/* Begin the frame of a call with the arguments of a tuple, which the caller keeps: 1 done, 0 Python must send the call,
 * -1 an exception. */
static int begin_call(Wire *self, Frame *frame, PyObject *actor, PyObject *code, PyObject *args) {
    if (!wire_is_whole(self)) return -1;
    frame->actor = (uint32_t)PyLong_AsUnsignedLong(actor);
    frame->code = PyLong_AsUnsignedLong(code);
    if (PyErr_Occurred()) return -1;
    int waits = has_backlog(self);
    if (waits) return waits < 0 ? -1 : 0;
    frame->kind = KIND_CALL;
    frame->array = 1;
    frame->extra = 0;
    frame->id = ++self->next_id;
    frame->values = ((PyTupleObject *)args)->ob_item;
    frame->count = PyTuple_GET_SIZE(args);
    frame->table = frame->key = frame->call = NULL;
    frame->whole = 0;
    frame->shared = NULL;
    return 1;
}
/* call(call, actor, code, args): send a call. False: Python must send it, and nothing was done; None: likewise, as there
 * is a reference among the arguments. */
static PyObject *wire_call(Wire *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 4 || !PyTuple_Check(args[3])) {
        PyErr_SetString(PyExc_TypeError, "call(call, actor, code, args)");
        return NULL;
    }
    if (self->behind_after && wire_now() - self->heard > self->behind_after) Py_RETURN_FALSE;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args[3]); i++)
        if ((PyObject *)Py_TYPE(PyTuple_GET_ITEM(args[3], i)) == self->given[REF_TYPE]) Py_RETURN_NONE;
    Frame frame;
    int begun = begin_call(self, &frame, args[1], args[2], args[3]);
    if (begun <= 0) return begun < 0 ? NULL : Py_NewRef(Py_False);
    PyObject *call = args[0], *pending = self->given[PENDING], *id = PyLong_FromUnsignedLongLong(frame.id);
    if (!id) return NULL;
    /* Before any thread can send the frame, and so before it can be answered. */
    if (PyObject_SetAttr(call, self->state->str_id, id) < 0 ||
        PyObject_SetAttr(call, self->state->str_session, self->given[SESSION]) < 0 ||
        PyDict_SetItem(pending, id, call) < 0) {
        Py_DECREF(id);
        return NULL;
    }
    frame.table = pending;
    frame.key = id;
    frame.call = call;
    int written = write_frame(self, &frame);
    if (written == WRITTEN) {
        Py_DECREF(id);
        self->counters->calls++;
        self->counters->requests += !frame.actor;
        /* alone: nothing to batch with, start the peer now; unless a FORWARD frame is likely to follow, or the call
         * waits for a result */
        int alone = PyDict_GET_SIZE(pending) == 1 && !frame.npromises;
        if (alone && self->patience) {
            self->patience--;
            alone = 0;
        }
        if ((alone ? wire_flush(self) : wire_schedule_flush(self)) < 0) return NULL;
        Py_RETURN_TRUE;
    }
    int taken = take_back(self, call, id);
    Py_DECREF(id);
    if (taken < 0) return NULL;
    if (PyErr_Occurred()) return NULL;
    return PyBool_FromLong(!taken); /* the end of the connection has taken it, and ends the call */
}
/* tell(actor, code, args, more): send a call that nobody keeps open, because its method gives no answer. With `more`
 * another one follows in this turn. Calls of a batch are sent at its end, as answers are. False: Python must send it,
 * and nothing was done. */
static PyObject *wire_tell(Wire *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 4 || !PyTuple_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "tell(actor, code, args, more)");
        return NULL;
    }
    Frame frame;
    int begun = begin_call(self, &frame, args[0], args[1], args[2]);
    if (begun <= 0) return begun < 0 ? NULL : Py_NewRef(Py_False);
    int written = write_frame(self, &frame);
    if (written < 0) return NULL;
    if (written != WRITTEN) Py_RETURN_FALSE;
    self->counters->calls++;
    self->counters->requests += !frame.actor;
    if (args[3] != Py_True && self->feeding && PyThread_get_thread_ident() == self->thread) {
        if (++self->unflushed < ANSWERS_PER_FLUSH) Py_RETURN_TRUE;
        self->unflushed = 0;
    } else if (args[3] == Py_True || PyDict_GET_SIZE(self->given[PENDING])) {
        if (wire_schedule_flush(self) < 0) return NULL;
        Py_RETURN_TRUE;
    }
    if (wire_flush(self) < 0) return NULL;
    Py_RETURN_TRUE;
}
/* respond(id, value, more, pushed): send an answer. False: Python must send it, and nothing was sent. answer(id,
 * value): the same for a call that is not in the table of open calls. */
PyObject *wire_respond_with(Wire *self, PyObject *id, PyObject *const *value, int more, uint64_t pushed, int entered,
                         Shared *shared) {
    if (!wire_is_whole(self)) return NULL;
    PyObject *open = self->given[OPEN];
    if (entered) {
        int there = PyDict_Contains(open, id);
        if (there < 0) return NULL;
        if (!there) Py_RETURN_TRUE; /* it was answered already, or the caller has ended */
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
    frame.extra = pushed;
    frame.id = number;
    frame.values = value;
    frame.count = 1;
    frame.table = entered ? open : NULL;
    frame.key = id;
    frame.call = NULL;
    frame.whole = 0;
    frame.shared = shared;
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
    if (nargs != 3 && nargs != 4) {
        PyErr_SetString(PyExc_TypeError, "respond(id, value, more, pushed)");
        return NULL;
    }
    uint64_t pushed = nargs == 4 ? PyLong_AsUnsignedLongLong(args[3]) : 0;
    if (pushed == UINT64_MAX && PyErr_Occurred()) return NULL;
    return wire_respond_with(self, args[0], args + 1, args[2] == Py_True, pushed, 1, NULL);
}
/* flush_due(): send what was written, at the end of the turn of the loop in which that was scheduled. */
static PyObject *wire_flush_due(Wire *self, PyObject *Py_UNUSED(ignored)) {
    self->flush_scheduled = 0;
    if (!self->out) Py_RETURN_NONE; /* collected */
    int open = is_attr(self->given[SESSION], self->state->str_closed, Py_None);
    if (open < 0 || (open && wire_flush(self) < 0)) return NULL;
    Py_RETURN_NONE;
}
/* flush(): send what was written. */
static PyObject *wire_flush_now(Wire *self, PyObject *Py_UNUSED(ignored)) {
    if (!wire_is_whole(self) || wire_flush(self) < 0) return NULL;
    Py_RETURN_NONE;
}
static PyObject *wire_answer(Wire *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 2) {
        PyErr_SetString(PyExc_TypeError, "answer(id, value)");
        return NULL;
    }
    return wire_respond_with(self, args[0], args + 1, 0, 0, 0, NULL);
}
/* ---- leases to release */

/* Note a lease that goes back with the next frame: 0, or -1 with an exception. */
static int wire_note_release(Wire *self, uint64_t id) {
    if (self->nreleased == self->released_room) {
        Py_ssize_t room = self->released_room ? 2 * self->released_room : 64;
        uint64_t *released = PyMem_Realloc(self->released, (size_t)room * sizeof *released);
        if (!released) {
            PyErr_NoMemory();
            return -1;
        }
        self->released = released;
        self->released_room = room;
    }
    self->released[self->nreleased++] = id;
    return 0;
}
static PyObject *wire_release(Wire *self, PyObject *arg) {
    uint64_t id = PyLong_AsUnsignedLongLong(arg);
    if ((id == (uint64_t)-1 && PyErr_Occurred()) || wire_note_release(self, id) < 0) return NULL;
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

static PyObject *wire_get(Wire *self, void *Py_UNUSED(closure)) { return PyLong_FromSsize_t(self->nreleased); }
static PyMemberDef wire_members[] = {
    {"flush_scheduled", T_BOOL, offsetof(Wire, flush_scheduled), 0,
     "schedule_flush was called; whoever flushes resets it."},
    {"patience", T_UBYTE, offsetof(Wire, patience), 0, "Calls to come that are flushed with what follows them."},
    {"heard", T_LONGLONG, offsetof(Wire, heard), 0, "Ms of the monotonic clock: the last batch came, or none was there."},
    {"behind_after", T_INT, offsetof(Wire, behind_after), 0, "Ms after `heard` until Python sends calls; 0: never."},
    {"sent", T_ULONGLONG, offsetof(Wire, next_id), READONLY, "The id of the last call that was sent."},
    {NULL, 0, 0, 0, NULL}};
static PyMethodDef wire_methods[] = {
    {"call", (PyCFunction)(void (*)(void))wire_call, METH_FASTCALL,
     "call(call, actor, code, args): whether it was sent."},
    {"tell", (PyCFunction)(void (*)(void))wire_tell, METH_FASTCALL,
     "tell(actor, code, args, more): whether a call without an answer was sent."},
    {"respond", (PyCFunction)(void (*)(void))wire_respond, METH_FASTCALL,
     "respond(id, value, more, pushed): whether that is done."},
    {"forward", (PyCFunction)(void (*)(void))wire_forward, METH_FASTCALL,
     "forward(id, number, key, target): whether it was written."},
    {"push", (PyCFunction)(void (*)(void))wire_push, METH_FASTCALL, "push(key, word, value, more): whether it was sent."},
    {"pass_on", (PyCFunction)(void (*)(void))wire_pass_on, METH_FASTCALL,
     "pass_on(id, value, more, pushed, to, key, word): whether it was pushed and answered; None: pushed alone."},
    {"flush_due", (PyCFunction)wire_flush_due, METH_NOARGS, "Send what was written, as scheduled, while open."},
    {"flush", (PyCFunction)wire_flush_now, METH_NOARGS, "Send what was written."},
    {"publish", (PyCFunction)(void (*)(void))wire_publish, METH_FASTCALL,
     "publish(key, word, values, whole): whether it was sent."},
    {"answer", (PyCFunction)(void (*)(void))wire_answer, METH_FASTCALL,
     "answer(id, value): respond to a call that is not open."},
    {"frame", (PyCFunction)(void (*)(void))wire_frame, METH_FASTCALL,
     "frame(kind, flags, code, actor, id, extra, payload): whether it was written."},
    {"look", (PyCFunction)wire_look_now, METH_NOARGS, "Before Python flushes: see whether the peer has hung up."},
    {"next_id", (PyCFunction)wire_next_id, METH_NOARGS, "An id for a call that goes the other way."},
    {"feed", (PyCFunction)wire_feed, METH_O, "feed(data): take in whole frames."},
    {"release", (PyCFunction)wire_release, METH_O, "A lease goes back with the next frame."},
    {"take_releases", (PyCFunction)wire_take_releases, METH_O, "The ids of at most n leases to give back."},
    {NULL, NULL, 0, NULL}};
static PyGetSetDef wire_getset[] = {{"releases", (getter)wire_get, NULL, "Leases that wait to go back.", NULL},
                                    {NULL, NULL, NULL, NULL, NULL}};
static PyType_Slot wire_slots[] = {{Py_tp_new, wire_new},
                                   {Py_tp_dealloc, wire_dealloc},
                                   {Py_tp_traverse, wire_traverse},
                                   {Py_tp_clear, wire_clear},
                                   {Py_tp_methods, wire_methods},
                                   {Py_tp_getset, wire_getset},
                                   {Py_tp_members, wire_members},
                                   {Py_tp_doc,
                                    (char *)"The plain frames of one session: Wire(out, credits, counters, process, "
                                            "peer, eager_limit, max_frame, arena_nbytes, "
                                            "callbacks, given), see zcactor.rpc.session: the functions that it calls, "
                                            "and the objects that it shares by name."},
                                   {0, NULL}};
PyType_Spec wire_spec = {.name = "zcactor.native._hot.Wire",
                         .basicsize = sizeof(Wire),
                         .slots = wire_slots,
                         .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_HAVE_GC};
