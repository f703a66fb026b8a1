/* Admission: whether a call to an actor may start now is decided here alone; see zcactor/execution/mailbox.py. */
#include "hot.h"

enum { SYNC, ASYNC, GENERATOR, ASYNC_GENERATOR, INLINE }; /* zcactor.interface.MethodKind */

/* ---- Admission */

typedef struct {
    PyObject_HEAD
    Py_ssize_t running, limit;
} Admission;

static int admission_init(Admission *self, PyObject *args, PyObject *kwargs) {
    if (kwargs && PyDict_GET_SIZE(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "Admission takes no keywords");
        return -1;
    }
    return PyArg_ParseTuple(args, "n", &self->limit) ? 0 : -1;
}
static PyObject *admission_task_ended(Admission *self, PyObject *Py_UNUSED(ignored)) {
    return PyBool_FromLong(self->running-- == self->limit);
}
static int is_full(const Admission *self) { return self->running >= self->limit; }
static PyObject *admission_full(Admission *self, void *Py_UNUSED(closure)) { return PyBool_FromLong(is_full(self)); }
static PyMethodDef admission_methods[] = {
    {"task_ended", (PyCFunction)admission_task_ended, METH_NOARGS,
     "A task has ended; whether there were as many as there may be, so that held calls may start now."},
    {NULL, NULL, 0, NULL}};
static PyMemberDef admission_members[] = {
    {"running", T_PYSSIZET, offsetof(Admission, running), READONLY, "Tasks that were admitted and have not ended."},
    {NULL, 0, 0, 0, NULL}};
static PyGetSetDef admission_getset[] = {
    {"full", (getter)admission_full, NULL, "Whether as many tasks run as may run at the same time.", NULL},
    {NULL, NULL, NULL, NULL, NULL}};
static PyType_Slot admission_slots[] = {
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, admission_init},
    {Py_tp_methods, admission_methods},
    {Py_tp_members, admission_members},
    {Py_tp_getset, admission_getset},
    {Py_tp_doc, (char *)"The tasks of one mailbox: Admission(limit)."},
    {0, NULL}};
PyType_Spec admission_spec = {.name = "zcactor.native._hot.Admission",
                              .basicsize = sizeof(Admission),
                              .slots = admission_slots,
                              .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE};

/* ---- Lane */

typedef struct {
    PyObject_HEAD
    Admission *admission;
    PyObject *held;
    Py_ssize_t put, started, unstarted; /* calls of threads, those of them that have begun; tasks before the first step */
    char pumping;
    PyObject *module;
} Lane;

static int lane_traverse(Lane *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->module);
    Py_VISIT(self->admission);
    Py_VISIT(self->held);
    return 0;
}
static void lane_dealloc(Lane *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->admission);
    Py_XDECREF(self->held);
    Py_XDECREF(self->module);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}
static PyObject *lane_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *admission, *held;
    State *state;
    PyObject *module = module_of(type, &state);
    if (!module) return NULL;
    if (kwargs && PyDict_GET_SIZE(kwargs)) return PyErr_Format(PyExc_TypeError, "Lane takes no keywords");
    if (!PyArg_ParseTuple(args, "O!O", state->admission_type, &admission, &held)) return NULL;
    if (PyObject_Size(held) < 0) return NULL;
    Lane *self = (Lane *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->module = Py_NewRef(module);
    self->admission = (Admission *)Py_NewRef(admission);
    self->held = Py_NewRef(held);
    return (PyObject *)self;
}
/* Start a call, if it may start: a call of a thread after the first steps of the tasks before it, a task once the
 * threads have begun all calls before it and there is room for it, and an inline call after both. */
static PyObject *start(Lane *self, PyObject *kind) {
    const long number = PyLong_AsLong(kind);
    if (number == -1 && PyErr_Occurred()) return NULL;
    const int task = number == ASYNC || number == ASYNC_GENERATOR, threaded = number == SYNC || number == GENERATOR;
    if (!task && self->unstarted) Py_RETURN_FALSE;
    if (!threaded && (self->put != self->started || is_full(self->admission))) Py_RETURN_FALSE;
    if (threaded) self->put++;
    else if (task) {
        self->unstarted++;
        self->admission->running++;
    }
    Py_RETURN_TRUE;
}
static PyObject *lane_admit(Lane *self, PyObject *kind) {
    const Py_ssize_t held = PyObject_Size(self->held);
    if (held) return held < 0 ? NULL : Py_NewRef(Py_False);
    return start(self, kind);
}
static PyObject *holds(Lane *self) {
    const Py_ssize_t held = PyObject_Size(self->held);
    return held < 0 ? NULL : PyBool_FromLong(held > 0);
}
static PyObject *lane_thread_began(Lane *self, PyObject *Py_UNUSED(ignored)) {
    self->started++;
    return holds(self);
}
static PyObject *lane_task_began(Lane *self, PyObject *Py_UNUSED(ignored)) {
    self->unstarted--;
    return holds(self);
}
static PyMethodDef lane_methods[] = {
    {"admit", (PyCFunction)lane_admit, METH_O,
     "admit(kind): whether a call of that kind starts now, behind no held call; it is counted then."},
    {"admit_held", (PyCFunction)start, METH_O, "admit_held(kind): the same for the first of the held calls."},
    {"thread_began", (PyCFunction)lane_thread_began, METH_NOARGS,
     "A thread begins a call; whether held calls may start now. From any thread."},
    {"task_began", (PyCFunction)lane_task_began, METH_NOARGS,
     "A task takes its first step; whether held calls may start after it."},
    {NULL, NULL, 0, NULL}};
static PyMemberDef lane_members[] = {
    {"held", T_OBJECT_EX, offsetof(Lane, held), READONLY, "The calls that may not start yet."},
    {"pumping", T_BOOL, offsetof(Lane, pumping), 0, "Whether held calls are being started."},
    {NULL, 0, 0, 0, NULL}};
static PyType_Slot lane_slots[] = {
    {Py_tp_new, lane_new},
    {Py_tp_dealloc, lane_dealloc},
    {Py_tp_traverse, lane_traverse},
    {Py_tp_methods, lane_methods},
    {Py_tp_members, lane_members},
    {Py_tp_doc, (char *)"One caller's calls to one mailbox: Lane(admission, held), with an empty deque."},
    {0, NULL}};
PyType_Spec lane_spec = {.name = "zcactor.native._hot.Lane",
                         .basicsize = sizeof(Lane),
                         .slots = lane_slots,
                         .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_HAVE_GC};
