/* The module zcactor.native._hot: its types, and the objects that Python passes to it before anything else. */
#include "hot.h"
#include "_living.h"

PyObject *module_of(PyTypeObject *type, State **state) {
    PyObject *module = PyType_GetModule(type);
    if (!module) return NULL;
    *state = PyModule_GetState(module);
    if ((*state)->credits_type) return module; /* the first of the types that clear_state takes */
    PyErr_SetString(PyExc_RuntimeError, "this module is being collected");
    return NULL;
}

static PyObject *setup(PyObject *module, PyObject *args) {
    State *state = PyModule_GetState(module);
    const char *bytes;
    Py_ssize_t n;
    PyObject *error, *lost, *queued, *sent;
    if (!PyArg_ParseTuple(args, "y#OOOO", &bytes, &n, &error, &lost, &queued, &sent)) return NULL;
    if (n != CONSTANT_NBYTES)
        return PyErr_Format(PyExc_ValueError, "the template has %zd bytes instead of %d", n, CONSTANT_NBYTES);
    memcpy(state->constant, bytes, CONSTANT_NBYTES);
    Py_XSETREF(state->protocol_error, Py_NewRef(error));
    Py_XSETREF(state->connection_lost, Py_NewRef(lost));
    Py_XSETREF(state->state_queued, Py_NewRef(queued));
    Py_XSETREF(state->state_sent, Py_NewRef(sent));
    Py_RETURN_NONE;
}

/* The number of a class's present state, 0 where it has none. A lookup of an attribute that every class has, and that
   is found beside the class rather than in its metaclass, makes the interpreter number it. */
static PyObject *type_version(PyObject *Py_UNUSED(module), PyObject *given) {
    if (!PyType_Check(given))
        return PyErr_Format(PyExc_TypeError, "a class is needed, not %.80s", Py_TYPE(given)->tp_name);
    PyObject *found = PyObject_GetAttrString(given, "__init__");
    if (!found) return NULL;
    Py_DECREF(found);
    PyTypeObject *type = (PyTypeObject *)given;
#if PY_VERSION_HEX < 0x030d0000 /* later ones set no flag, but the number of a changed class to 0 */
    if (!PyType_HasFeature(type, Py_TPFLAGS_VALID_VERSION_TAG)) return PyLong_FromLong(0);
#endif
    return PyLong_FromUnsignedLong(type->tp_version_tag);
}
static PyMethodDef functions[] = {
    {"type_version", type_version, METH_O, "type_version(class): the number of its present state, 0 for none."},
    {"setup", setup, METH_VARARGS,
     "setup(template, ProtocolError, ConnectionLost, CallState.QUEUED, CallState.SENT): before anything else."},
    {"fold", hot_fold, METH_VARARGS, FOLD_DOC},
    {"folded", hot_folded, METH_VARARGS, FOLDED_DOC},
    {"copy", hot_copy, METH_VARARGS, COPY_DOC},
    {"receive", hot_receive, METH_VARARGS, RECEIVE_DOC},
    {"with_numpy", hot_with_numpy, METH_NOARGS, "with_numpy(): have arrays in frames read and written here."},
    {"address", hot_address, METH_O, "address(array): that of its first element."},
    {"array_over", hot_array_over, METH_VARARGS,
     "array_over(base, address, like): a read-only array with the dtype and shape of `like`, over memory of `base`."},
    {"sole", hot_sole, METH_O,
     "sole(array): whether no other object holds the arrays that it is a view of, down to the owner of the memory."},
    {"references", hot_references, METH_O, "references(object): the number of references to it, the caller's among them."},
    {"open", hot_open, METH_O, "open(array): let it be written to again, whatever it is a view of."},
    {"digest", hot_digest, METH_VARARGS,
     "digest(address, nbytes): 64 bits that are others when bytes have changed, but for a chance of 2**-64. Other\n"
     "threads run meanwhile. It keeps nobody from forging bytes."},
    {"lend", hot_lend, METH_O, "lend(array): make it read-only, once more. False: it was read-only, and not lent."},
    {"give_back", hot_give_back, METH_O, "give_back(array): end a loan or a claim. With the last one it is writable again, unless it was kept."},
    {"claim", hot_claim, METH_O, "claim(array): make it read-only until a result is written to it, and it is given back."},
    {"claimed", hot_claimed, METH_O, "claimed(array): whether it, or an array that it is a view of, was claimed."},
    {"lent", hot_lent, METH_O, "lent(array): whether it becomes writable again, as it was lent or claimed."},
    {"keep", hot_keep, METH_O, "keep(array): make it read-only, also behind the end of its loans."},
    LIVING_METHOD
    {NULL, NULL, 0, NULL}};
static const struct {
    size_t at;
    const char *text;
} strings[] = {{offsetof(State, str_complete_plain), "complete_plain"},
               {offsetof(State, str_grant), "grant"},
               {offsetof(State, str_withdraw), "withdraw"},
               {offsetof(State, str_release), "release"},
               {offsetof(State, str_store), "store"},
               {offsetof(State, str_sealed), "sealed"},
               {offsetof(State, str_exported), "exported"},
               {offsetof(State, str_id), "id"},
               {offsetof(State, str_offset), "offset"},
               {offsetof(State, str_address), "address"},
               {offsetof(State, str_session), "session"},
               {offsetof(State, str_state), "state"},
               {offsetof(State, str_receive_plain), "receive_plain"},
               {offsetof(State, str_receive_linked), "receive_linked"},
               {offsetof(State, str_key), "key"},
               {offsetof(State, str_label), "label"},
               {offsetof(State, str_forwarded), "forwarded"},
               {offsetof(State, str_pushed), "pushed"},
               {offsetof(State, str_full), "full"},
               {offsetof(State, str_flush), "flush"},
               {offsetof(State, str_setflags), "setflags"},
               {offsetof(State, str_closed), "closed"},
               {offsetof(State, str_flush_due), "flush_due"},
               {offsetof(State, str_call_soon), "call_soon"},
               {offsetof(State, str_append), "append"}};
static const struct {
    size_t at;
    PyType_Spec *spec;
} types[] = {{offsetof(State, credits_type), &credits_spec},         {offsetof(State, counters_type), &counters_spec},
             {offsetof(State, send_buffer_type), &send_buffer_spec}, {offsetof(State, wire_type), &wire_spec},
             {offsetof(State, reader_type), &reader_spec},           {offsetof(State, cipher_type), &cipher_spec},
             {offsetof(State, meeting_type), &meeting_spec},         {offsetof(State, seat_type), &seat_spec},
             {offsetof(State, admission_type), &admission_spec}, {offsetof(State, lane_type), &lane_spec}};
#define LENGTH(array) (sizeof(array) / sizeof *(array))
#define FIELD(T, state, offset) ((T **)(void *)((char *)(state) + (offset)))

static int traverse_state(PyObject *module, visitproc visit, void *arg) {
    const State *state = PyModule_GetState(module);
    Py_VISIT(state->protocol_error);
    Py_VISIT(state->connection_lost);
    Py_VISIT(state->state_queued);
    Py_VISIT(state->state_sent);
    Py_VISIT(state->lent);
    for (size_t i = 0; i < LENGTH(types); i++) Py_VISIT(*FIELD(PyTypeObject, state, types[i].at));
    return 0;
}
/* Placeholders for the objects that Python passes: an object of this module may run before that, and in a cycle
 * after it. */
static void forget_given(State *state) {
    Py_XSETREF(state->protocol_error, Py_NewRef(PyExc_RuntimeError));
    Py_XSETREF(state->connection_lost, Py_NewRef(PyExc_RuntimeError));
    Py_XSETREF(state->state_queued, Py_NewRef(Py_None));
    Py_XSETREF(state->state_sent, Py_NewRef(Py_None));
}
/* The strings stay, for the same objects. */
static int clear_state(PyObject *module) {
    State *state = PyModule_GetState(module);
    forget_given(state);
    if (state->lent) PyDict_Clear(state->lent);
    for (size_t i = 0; i < LENGTH(types); i++) Py_CLEAR(*FIELD(PyTypeObject, state, types[i].at));
    return 0;
}
static void free_state(void *module) {
    State *state = PyModule_GetState(module);
    clear_state(module);
    Py_CLEAR(state->protocol_error);
    Py_CLEAR(state->connection_lost);
    Py_CLEAR(state->state_queued);
    Py_CLEAR(state->state_sent);
    Py_CLEAR(state->lent);
    for (size_t i = 0; i < LENGTH(strings); i++) Py_CLEAR(*FIELD(PyObject, state, strings[i].at));
}
static int fill_module(PyObject *module) {
    State *state = PyModule_GetState(module);
    forget_given(state);
    if (!(state->lent = PyDict_New())) return -1;
    for (size_t i = 0; i < LENGTH(strings); i++) {
        PyObject *text = PyUnicode_InternFromString(strings[i].text);
        if (!text) return -1;
        *FIELD(PyObject, state, strings[i].at) = text;
    }
    for (size_t i = 0; i < LENGTH(types); i++) {
        PyTypeObject *type = (PyTypeObject *)PyType_FromModuleAndSpec(module, types[i].spec, NULL);
        if (!type) return -1;
        *FIELD(PyTypeObject, state, types[i].at) = type;
        COUNT_OBJECTS(type);
        if (PyModule_AddType(module, type) < 0) return -1;
    }
    return 0;
}
static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, fill_module},
#ifdef Py_mod_gil
                                          {Py_mod_gil, Py_MOD_GIL_USED},
#endif
                                          {0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                                        .m_name = "zcactor.native._hot",
                                        .m_size = sizeof(State),
                                        .m_methods = functions,
                                        .m_doc =
                                            "Plain frames, credits and send buffers in C; see the comment in hot.h.",
                                        .m_slots = module_slots,
                                        .m_traverse = traverse_state,
                                        .m_clear = clear_state,
                                        .m_free = free_state};
PyMODINIT_FUNC PyInit__hot(void) { return PyModuleDef_Init(&definition); }
