/* Credits: the account of one end of a connection; see zcactor/transport/credits.py. */
#include "hot.h"

static int credits_init(Credits *self, PyObject *args, PyObject *kwargs) {
    int depth;
    if (kwargs && PyDict_GET_SIZE(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "Credits takes no keywords");
        return -1;
    }
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
int credits_refuse_returned(Credits *self, long count) {
    const State *state = PyType_GetModuleState(Py_TYPE(self));
    if (state)
        PyErr_Format(state->protocol_error, "the peer returned %ld credits, but only %d frames are outstanding", count,
                     self->window - self->available);
    return -1;
}
int credits_refuse_consumed(Credits *self) {
    const State *state = PyType_GetModuleState(Py_TYPE(self));
    if (state)
        PyErr_Format(state->protocol_error, "the peer sent a frame beyond its window of %d, none of them acknowledged",
                     self->window);
    return -1;
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
    {"consumed", (PyCFunction)(void (*)(void))credits_consumed, METH_FASTCALL,
     "That many of the peer's frames were consumed."},
    {"take_owed", (PyCFunction)credits_take_owed, METH_NOARGS, "What to write into the next frame's credits field."},
    {NULL, NULL, 0, NULL}};
static PyGetSetDef credits_getset[] = {
    {"window", (getter)credits_get, NULL, "Frames that may be outstanding in each direction.", (void *)0},
    {"available", (getter)credits_get, NULL, "Frames that may be sent now.", (void *)1},
    {"owed", (getter)credits_get, NULL, "Frames consumed and not yet reported.", (void *)2},
    {"due", (getter)credits_get, NULL, "A CREDIT frame must go now unless another frame does.", (void *)3},
    {NULL, NULL, NULL, NULL, NULL}};
static PyType_Slot credits_slots[] = {
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, credits_init},
    {Py_tp_methods, credits_methods},
    {Py_tp_getset, credits_getset},
    {Py_tp_doc, (char *)"The credits of one end of a connection, see zcactor.transport.credits: Credits(depth)."},
    {0, NULL}};
PyType_Spec credits_spec = {.name = "zcactor.native._hot.Credits",
                            .basicsize = sizeof(Credits),
                            .slots = credits_slots,
                            .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE};
