/* A holder of a block, as a Python object: the block is free when its last holder is gone.
 *
 * The rule: after a call that may run Python, read every field again; own every object that is used across the call.
 */
#include "objects.h"

typedef struct {
    PyObject_HEAD
    Heap *heap;
    uint64_t offset, id, nbytes;
} Hold;

/* Make an object for one holder of a block. It takes the holder over, also when it fails. */
PyObject *new_hold(Heap *self, uint64_t offset, uint64_t nbytes, uint64_t id) {
    State *state = state_of(self);
    Hold *hold = state ? PyObject_GC_New(Hold, state->hold_type) : NULL;
    if (!hold) { release(self->shared->heap, offset, 0); return NULL; }
    hold->offset = offset;
    hold->nbytes = nbytes;
    hold->id = id;
    hold->heap = (Heap *)Py_NewRef(self);
    LIVING(1);
    PyObject_GC_Track(hold);
    return (PyObject *)hold;
}
/* There is no tp_clear: a cycle through a hold continues through its heap, which has a tp_clear, and a hold without its
 * heap could not free the block. */
static int hold_traverse(Hold *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->heap);
    return 0;
}
static void hold_dealloc(Hold *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    release(self->heap->shared->heap, self->offset, 0); /* no lock of Python: the garbage collector may run this */
    Py_DECREF(self->heap);
    LIVING(-1);
    PyObject_GC_Del(self);
    Py_DECREF(type);
}

static PyMemberDef members[] = {
    {"offset", T_ULONGLONG, offsetof(Hold, offset), READONLY, "Bytes from the start of the arena."},
    {"id", T_ULONGLONG, offsetof(Hold, id), READONLY, "Id by which peers name the block; the same for every holder."},
    {"nbytes", T_ULONGLONG, offsetof(Hold, nbytes), READONLY, "Bytes that were requested."},
    {NULL, 0, 0, 0, NULL}};
static PyType_Slot slots[] = {
    {Py_tp_doc, "One holder of a block. The block is free when its last holder is gone."},
    {Py_tp_traverse, hold_traverse},
    {Py_tp_dealloc, hold_dealloc},
    {Py_tp_members, members},
    {0, NULL}};
PyType_Spec hold_spec = {
    .name = "zcactor.objectstore.heap._heap.Hold",
    .basicsize = sizeof(Hold),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots};
