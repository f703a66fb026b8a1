/* The module: its state, its types, and its functions.
 *
 * The rule: after a call that may run Python, read every field again; own every object that is used across the call.
 */
#include "objects.h"
#include "../../native/_living.h"

#ifdef COUNT_LIVING
void note_living(Py_ssize_t change) { COUNT(change); }
#endif

/* The state of the module that made the heap; NULL with an exception once the garbage collector has cleared it. */
State *state_of(Heap *self) {
    State *state = PyType_GetModuleState(Py_TYPE(self));
    if (state && state->hold_type && state->out_of_memory) return state;
    PyErr_SetString(PyExc_RuntimeError, "the module of the heap is gone");
    return NULL;
}
static int add_type(PyObject *module, PyTypeObject **made, PyType_Spec *spec) {
    *made = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL);
    return *made ? PyModule_AddType(module, *made) : -1;
}
static int execute(PyObject *module) {
    State *state = PyModule_GetState(module);
    PyObject *errors = PyImport_ImportModule("zcactor.errors");
    state->out_of_memory = errors ? PyObject_GetAttrString(errors, "OutOfMemory") : NULL;
    Py_XDECREF(errors);
    if (!state->out_of_memory) return -1;
    if (watch_forks()) { PyErr_NoMemory(); return -1; }
    if (add_type(module, &state->heap_type, &heap_spec) < 0) return -1;
    COUNT_OBJECTS(state->heap_type);
    return add_type(module, &state->hold_type, &hold_spec);
}
static int traverse(PyObject *module, visitproc visit, void *arg) {
    State *state = PyModule_GetState(module);
    Py_VISIT(state->heap_type);
    Py_VISIT(state->hold_type);
    Py_VISIT(state->out_of_memory);
    return 0;
}
static int clear(PyObject *module) {
    State *state = PyModule_GetState(module);
    Py_CLEAR(state->heap_type);
    Py_CLEAR(state->hold_type);
    Py_CLEAR(state->out_of_memory);
    return 0;
}
static void finish(void *module) { clear(module); }

static PyObject *reap(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored)) {
    reap_children();
    Py_RETURN_NONE;
}
/* child(): a descriptor that ends when the child of this thread's last fork has ended, and the children of that; None: the child
 * sees no heap of this process. The caller closes it. */
static PyObject *child(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored)) {
    int fd = dup_of_child();
    if (fd < 0) Py_RETURN_NONE;
    return PyLong_FromLong(fd);
}

static PyMethodDef functions[] = {
    {"reap", reap, METH_NOARGS, "reap(): close the descriptors of forked children that have ended"},
    {"child", child, METH_NOARGS, "child() -> descriptor that ends with the child of this thread's last fork, or None"},
    {"use_handler", use_handler, METH_O, "use_handler(handler) -> the handler that was set"},
    {"allocate_elsewhere", allocate_elsewhere, METH_NOARGS,
     "allocate_elsewhere() -> the handler that was set; NumPy allocates by the handler under ours"},
    LIVING_METHOD
    {NULL, NULL, 0, NULL}};
static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, execute},
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_USED}, /* fields that are `changed under the interpreter lock` have no other lock */
#endif
    {0, NULL}};
static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "zcactor.objectstore.heap._heap",
    .m_doc = "The heap of an arena; see the comments in heap.h and objects.h.",
    .m_size = sizeof(State),
    .m_methods = functions,
    .m_slots = slots,
    .m_traverse = traverse,
    .m_clear = clear,
    .m_free = finish};
PyMODINIT_FUNC PyInit__heap(void) { return PyModuleDef_Init(&definition); }
