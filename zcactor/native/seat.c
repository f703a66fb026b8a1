/* Meeting and Seat: the publications of the ranks of a group, as they come in PUSH frames; see
 * zcactor/collectives/member.py and zcactor/collectives/fast_path.py. */
#include "hot.h"

#define RANK_BITS 20 /* zcactor.collectives.member: bits of a PUSH frame's key for the rank that has sent it */
#define RANK_MASK ((1u << RANK_BITS) - 1)
#define STEPS (1LL << 43) /* zcactor.collectives.steps.STEPS: Python takes what belongs to a reducer's step */

typedef struct {
    PyObject_HEAD
    PyObject *signature, *met;      /* met(values) is called once all have come; NULL: collected */
    PyObject **values, **strangers; /* by rank: the value, and the signature where it is not ours; NULL: none */
    Py_ssize_t size, missing, nbytes;
    char odd;
    PyObject *module;
    State *state; /* of the module */
} Meeting;

static int meeting_traverse(Meeting *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->module);
    Py_VISIT(self->met);
    for (Py_ssize_t i = 0; i < self->size; i++) Py_VISIT(self->values[i]);
    return 0;
}
static int meeting_clear(Meeting *self) {
    Py_CLEAR(self->met);
    for (Py_ssize_t i = 0; i < self->size; i++) {
        Py_CLEAR(self->values[i]);
        Py_CLEAR(self->strangers[i]);
    }
    return 0;
}
static void meeting_dealloc(Meeting *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    meeting_clear(self);
    PyMem_Free(self->values);
    Py_XDECREF(self->signature);
    Py_DECREF(self->module);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}
static PyObject *meeting_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *signature, *met;
    Py_ssize_t size, nbytes;
    State *state;
    PyObject *module = module_of(type, &state);
    if (!module) return NULL;
    if (kwargs && PyDict_GET_SIZE(kwargs)) return PyErr_Format(PyExc_TypeError, "Meeting takes no keywords");
    if (import_numpy() < 0) return NULL; /* for the values of ranks */
    if (!PyArg_ParseTuple(args, "UnnO", &signature, &size, &nbytes, &met)) return NULL;
    if (size < 1 || size > RANK_MASK) return PyErr_Format(PyExc_ValueError, "a meeting of %zd ranks", size);
    PyObject **values = PyMem_Calloc((size_t)size * 2, sizeof *values);
    if (!values) return PyErr_NoMemory();
    Meeting *self = (Meeting *)type->tp_alloc(type, 0);
    if (!self) {
        PyMem_Free(values);
        return NULL;
    }
    self->module = Py_NewRef(module);
    self->state = state;
    self->signature = Py_NewRef(signature);
    self->met = Py_NewRef(met);
    self->values = values;
    self->strangers = values + size;
    self->nbytes = nbytes;
    self->size = self->missing = size;
    return (PyObject *)self;
}
/* Bytes of an array or of bytes; -1 for anything else. */
static Py_ssize_t nbytes_of(PyObject *value) {
    if (PyArray_CheckExact(value)) return PyArray_NBYTES((PyArrayObject *)value);
    return PyBytes_CheckExact(value) ? PyBytes_GET_SIZE(value) : -1;
}
/* Take the value of a rank that has given none. With the last one call met: 0, or -1 with an exception. */
static int meeting_enter(Meeting *self, Py_ssize_t rank, PyObject *signature, PyObject *value) {
    if (signature != self->signature) {
        int same = PyUnicode_Compare(signature, self->signature) == 0;
        if (!same && PyErr_Occurred()) return -1;
        if (!same) {
            self->strangers[rank] = Py_NewRef(signature);
            self->odd = 1;
        }
    }
    if (self->nbytes >= 0 && nbytes_of(value) != self->nbytes) self->odd = 1;
    self->values[rank] = Py_NewRef(value);
    if (--self->missing || !self->met) return 0;
    PyObject *values = NULL, *met = self->met; /* which refers to the operation, and that to this meeting */
    self->met = NULL;
    if (self->odd) values = Py_NewRef(Py_None);
    else if ((values = PyTuple_New(self->size)))
        for (Py_ssize_t i = 0; i < self->size; i++) PyTuple_SET_ITEM(values, i, Py_NewRef(self->values[i]));
    PyObject *done = values ? PyObject_CallOneArg(met, values) : NULL;
    Py_DECREF(met);
    Py_XDECREF(values);
    Py_XDECREF(done);
    return done ? 0 : -1;
}
/* take(rank, signature, value) */
static PyObject *meeting_take(Meeting *self, PyObject *const *args, Py_ssize_t nargs) {
    Py_ssize_t rank = nargs == 3 ? PyLong_AsSsize_t(args[0]) : -1;
    if (rank == -1 && PyErr_Occurred()) return NULL;
    if (rank < 0 || rank >= self->size || !PyUnicode_CheckExact(args[1]))
        return PyErr_Format(PyExc_TypeError, "take(rank, signature, value), with a rank below %zd", self->size);
    if (self->values[rank])
        return PyErr_Format(self->state->protocol_error, "rank %zd published an operation of a group twice", rank);
    Py_INCREF(self);
    int failed = meeting_enter(self, rank, args[1], args[2]);
    Py_DECREF(self);
    if (failed) return NULL;
    Py_RETURN_NONE;
}
static PyObject *meeting_publications(Meeting *self, PyObject *Py_UNUSED(ignored)) {
    PyObject *found = PyDict_New();
    for (Py_ssize_t i = 0; found && i < self->size; i++) {
        if (!self->values[i]) continue;
        PyObject *rank = PyLong_FromSsize_t(i),
                 *entry = PyTuple_Pack(2, self->strangers[i] ? self->strangers[i] : self->signature, self->values[i]);
        if (!rank || !entry || PyDict_SetItem(found, rank, entry) < 0) Py_CLEAR(found);
        Py_XDECREF(rank);
        Py_XDECREF(entry);
    }
    return found;
}
static PyObject *meeting_close(Meeting *self, PyObject *Py_UNUSED(ignored)) {
    Py_CLEAR(self->met);
    Py_RETURN_NONE;
}
static PyObject *meeting_missing(Meeting *self, void *Py_UNUSED(closure)) {
    PyObject *ranks = PyTuple_New(self->missing);
    for (Py_ssize_t i = 0, at = 0; ranks && i < self->size; i++) {
        if (self->values[i]) continue;
        PyObject *rank = PyLong_FromSsize_t(i);
        if (!rank) Py_CLEAR(ranks);
        else PyTuple_SET_ITEM(ranks, at++, rank);
    }
    return ranks;
}
static PyMemberDef meeting_members[] = {
    {"odd", T_BOOL, offsetof(Meeting, odd), 0, "Whether a publication is another call, of another size, or an error."},
    {NULL, 0, 0, 0, NULL}};
static PyGetSetDef meeting_getset[] = {
    {"missing", (getter)meeting_missing, NULL, "The ranks that have published nothing.", NULL},
    {NULL, NULL, NULL, NULL, NULL}};
static PyMethodDef meeting_methods[] = {
    {"take", (PyCFunction)(void (*)(void))meeting_take, METH_FASTCALL,
     "take(rank, signature, value): the publication of a rank."},
    {"publications", (PyCFunction)meeting_publications, METH_NOARGS, "Signature and value by rank."},
    {"close", (PyCFunction)meeting_close, METH_NOARGS, "Call met no more, and forget it."},
    {NULL, NULL, 0, NULL}};
static PyType_Slot meeting_slots[] = {
    {Py_tp_new, meeting_new},
    {Py_tp_dealloc, meeting_dealloc},
    {Py_tp_traverse, meeting_traverse},
    {Py_tp_clear, meeting_clear},
    {Py_tp_methods, meeting_methods},
    {Py_tp_members, meeting_members},
    {Py_tp_getset, meeting_getset},
    {Py_tp_doc, (char *)"The publications of one operation: Meeting(signature, size, nbytes, met). Once all ranks have "
                        "published, met gets their values in a tuple, or None where one has another signature, or is "
                        "not an array or bytes of `nbytes`, unless that is -1."},
    {0, NULL}};
PyType_Spec meeting_spec = {.name = "zcactor.native._hot.Meeting",
                            .basicsize = sizeof(Meeting),
                            .slots = meeting_slots,
                            .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_HAVE_GC};

/* ---- Seat */

static int seat_traverse(Seat *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->module);
    Py_VISIT(self->meetings);
    Py_VISIT(self->early);
    Py_VISIT(self->pieces);
    Py_VISIT(self->pushed);
    Py_VISIT(self->touch);
    return 0;
}
static int seat_clear(Seat *self) {
    self->open = 0;
    Py_CLEAR(self->meetings);
    Py_CLEAR(self->early);
    Py_CLEAR(self->pieces);
    Py_CLEAR(self->pushed);
    Py_CLEAR(self->touch);
    return 0;
}
static void seat_dealloc(Seat *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    seat_clear(self);
    Py_DECREF(self->module);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}
static PyObject *seat_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *meetings, *early, *pieces, *pushed;
    Py_ssize_t rank, size;
    State *state;
    PyObject *module = module_of(type, &state);
    if (!module) return NULL;
    if (kwargs && PyDict_GET_SIZE(kwargs)) return PyErr_Format(PyExc_TypeError, "Seat takes no keywords");
    if (!PyArg_ParseTuple(args, "nnO!O!O!O", &rank, &size, &PyDict_Type, &meetings, &PyDict_Type, &early, &PyDict_Type,
                          &pieces, &pushed))
        return NULL;
    Seat *self = (Seat *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->module = Py_NewRef(module);
    self->state = state;
    self->rank = rank;
    self->size = size;
    self->meetings = Py_NewRef(meetings);
    self->early = Py_NewRef(early);
    self->pieces = Py_NewRef(pieces);
    self->pushed = Py_NewRef(pushed);
    self->open = 1;
    return (PyObject *)self;
}
/* Keep a publication of an operation that this rank has not called yet: 0, or -1 with an exception. */
static int keep_early(Seat *self, PyObject *seq, Py_ssize_t rank, PyObject *signature, PyObject *value) {
    PyObject *entry = Py_XNewRef(PyDict_GetItemWithError(self->early, seq)), *number = PyLong_FromSsize_t(rank),
             *publication = PyTuple_Pack(2, signature, value);
    int failed = !number || !publication || (!entry && PyErr_Occurred());
    if (!failed && !entry) failed = !(entry = PyDict_New()) || PyDict_SetItem(self->early, seq, entry) < 0;
    if (!failed) failed = PyDict_SetItem(entry, number, publication) < 0;
    Py_XDECREF(publication);
    Py_XDECREF(number);
    Py_XDECREF(entry);
    return failed ? -1 : 0;
}
/* Take the values of a PUSH frame: 1 done, 0 Python must look at them, -1 an exception. */
int seat_take(Seat *self, uint64_t key, PyObject *values) {
    Py_ssize_t rank = (Py_ssize_t)(key & RANK_MASK);
    long long seq = (long long)(key >> RANK_BITS) - 1;
    if (!self->open || rank >= self->size || rank == self->rank || seq < 0 || seq >= STEPS ||
        !PyList_CheckExact(values) || PyList_GET_SIZE(values) != 2 || PyDict_GET_SIZE(self->pieces))
        return 0;
    PyObject *signature = PyList_GET_ITEM(values, 0), *value = PyList_GET_ITEM(values, 1);
    if (!PyUnicode_CheckExact(signature)) return 0;
    PyObject *number = PyLong_FromLongLong(seq);
    if (!number) return -1;
    PyObject *entry = PyDict_GetItemWithError(self->meetings, number);
    int taken = 0;
    if (!entry) {
        if (PyErr_Occurred()) taken = -1;
        else if (seq >= self->next) taken = keep_early(self, number, rank, signature, value) < 0 ? -1 : 1;
    } else if (Py_TYPE(entry) == self->state->meeting_type && rank < ((Meeting *)entry)->size &&
               !((Meeting *)entry)->values[rank]) {
        Py_INCREF(entry);
        Py_INCREF(self);
        PyObject *touched = self->touch ? PyObject_CallNoArgs(self->touch) : Py_NewRef(Py_None);
        taken = !touched || meeting_enter((Meeting *)entry, rank, signature, value) < 0 ? -1 : 1;
        Py_XDECREF(touched);
        Py_DECREF(self);
        Py_DECREF(entry);
    }
    Py_DECREF(number);
    return taken;
}
/* The same as pushed, for connections that Python reads. */
static PyObject *seat_call(Seat *self, PyObject *args, PyObject *kwargs) {
    if (!self->pushed) Py_RETURN_NONE;
    PyObject *pushed = Py_NewRef(self->pushed), *done = PyObject_Call(pushed, args, kwargs);
    Py_DECREF(pushed);
    return done;
}
/* take(key, values): whether they were taken. */
static PyObject *seat_try(Seat *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 2) return PyErr_Format(PyExc_TypeError, "take(key, values)");
    uint64_t key = PyLong_AsUnsignedLongLong(args[0]);
    if (key == (uint64_t)-1 && PyErr_Occurred()) return NULL;
    int taken = seat_take(self, key, args[1]);
    return taken < 0 ? NULL : PyBool_FromLong(taken);
}
static PyMethodDef seat_methods[] = {
    {"take", (PyCFunction)(void (*)(void))seat_try, METH_FASTCALL,
     "take(key, values): whether the values of a PUSH frame were taken here."},
    {NULL, NULL, 0, NULL}};
static PyMemberDef seat_members[] = {
    {"next", T_LONGLONG, offsetof(Seat, next), 0, "The number of the next operation of this rank."},
    {"open", T_BOOL, offsetof(Seat, open), 0, "Whether publications are taken here, and not by Python alone."},
    {"touch", T_OBJECT, offsetof(Seat, touch), 0, "Called for each publication that was awaited; None: nothing is."},
    {NULL, 0, 0, 0, NULL}};
static PyType_Slot seat_slots[] = {
    {Py_tp_new, seat_new},
    {Py_tp_dealloc, seat_dealloc},
    {Py_tp_traverse, seat_traverse},
    {Py_tp_clear, seat_clear},
    {Py_tp_call, seat_call},
    {Py_tp_methods, seat_methods},
    {Py_tp_members, seat_members},
    {Py_tp_doc, (char *)"One rank of a group, as a taker of PUSH frames: Seat(rank, size, meetings, early, pieces, "
                        "pushed). It enters publications into the meetings by operation, keeps early ones, and calls "
                        "pushed for everything else."},
    {0, NULL}};
PyType_Spec seat_spec = {.name = "zcactor.native._hot.Seat",
                         .basicsize = sizeof(Seat),
                         .slots = seat_slots,
                         .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_HAVE_GC};
