/* Encrypted records: zcactor.transport.stream.record_layer. */
#include "hot.h"

/* The encrypt or decrypt of an AESGCM with the cipher of libsodium, by its function's address:
 * crypto_aead_aes256gcm_encrypt or crypto_aead_aes256gcm_decrypt. See the decision about sealed frames,
 * docs/explanation/decisions/0017-sealed-frames.md. */
#define RECORD_NONCE 12
#define RECORD_KEY 32
#define CIPHER_ALONE (64 << 10) /* bytes from which on the interpreter lock is released meanwhile */
typedef unsigned char byte;
typedef int (*cipher_encrypt)(byte *, unsigned long long *, const byte *, unsigned long long, const byte *,
                              unsigned long long, const byte *, const byte *, const byte *);
typedef int (*cipher_decrypt)(byte *, unsigned long long *, byte *, const byte *, unsigned long long, const byte *,
                              unsigned long long, const byte *, const byte *);
#define CIPHER_ENCRYPT "zcactor.aes256gcm.encrypt" /* names of capsules, with functions of the types above */
#define CIPHER_DECRYPT "zcactor.aes256gcm.decrypt"
typedef struct {
    PyObject_HEAD
    void *function;
    PyObject *invalid; /* the exception for a record that does not decrypt; NULL: the cipher encrypts */
    PyObject *weak;    /* weak references, by which the keys of a process are dropped in a forked child */
    int forgotten;
    byte key[RECORD_KEY];
} Cipher;

static int cipher_init(Cipher *self, PyObject *args, PyObject *kwargs) {
    PyObject *address, *invalid = NULL;
    const char *key;
    Py_ssize_t size;
    if (kwargs && PyDict_GET_SIZE(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "Cipher takes no keywords");
        return -1;
    }
    if (!PyArg_ParseTuple(args, "Oy#|O", &address, &key, &size, &invalid)) return -1;
    if (self->function || self->forgotten) {
        PyErr_SetString(PyExc_RuntimeError, "a Cipher is initialised once");
        return -1;
    }
    if (size != RECORD_KEY) {
        PyErr_Format(PyExc_ValueError, "a key of %zd bytes; it has %d", size, RECORD_KEY);
        return -1;
    }
    void *function = PyCapsule_GetPointer(address, invalid ? CIPHER_DECRYPT : CIPHER_ENCRYPT); /* no number is one */
    if (!function) return -1;
    memcpy(self->key, key, RECORD_KEY);
    self->invalid = Py_XNewRef(invalid);
    self->function = function;
    return 0;
}
static int cipher_traverse(Cipher *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->invalid);
    return 0;
}
static int cipher_clear(Cipher *self) {
    self->function = NULL; /* before `invalid`, without which it would encrypt */
    Py_CLEAR(self->invalid);
    return 0;
}
static void cipher_dealloc(Cipher *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    if (self->weak) PyObject_ClearWeakRefs((PyObject *)self);
    cipher_clear(self);
    explicit_bzero(self->key, RECORD_KEY);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}
static PyObject *cipher_forget(Cipher *self, PyObject *Py_UNUSED(ignored)) {
    explicit_bzero(self->key, RECORD_KEY);
    self->forgotten = 1;
    self->function = NULL;
    Py_RETURN_NONE;
}
static PyObject *cipher_refuse(const Cipher *self) {
    if (!self->forgotten) return PyErr_Format(PyExc_RuntimeError, "this Cipher was not initialised");
    PyObject *errors = PyImport_ImportModule("zcactor.errors");
    PyObject *forked = errors ? PyObject_GetAttrString(errors, "ForkedProcess") : NULL;
    if (forked)
        PyErr_SetString(forked, "this connection belongs to the process that forked this one: its keys cannot be used "
                                "here");
    Py_XDECREF(forked);
    Py_XDECREF(errors);
    return NULL;
}
static PyObject *cipher_apply(Cipher *self, const char *nonce, PyObject *text, const char *header, Py_ssize_t head) {
    if (!self->function) return cipher_refuse(self);
    Py_ssize_t size = PyBytes_GET_SIZE(text) + (self->invalid ? -RECORD_TAG : RECORD_TAG);
    PyObject *made = size < 0 ? NULL : PyBytes_FromStringAndSize(NULL, size);
    if (!made && size >= 0) return NULL;
    int failed = -1;
    if (made) {
        const byte *from = (const byte *)PyBytes_AS_STRING(text), *ad = (const byte *)header,
                   *count = (const byte *)nonce;
        byte *to = (byte *)PyBytes_AS_STRING(made);
        unsigned long long n = (unsigned long long)PyBytes_GET_SIZE(text), written, ad_size = (unsigned long long)head;
        PyThreadState *state = n < CIPHER_ALONE ? NULL : PyEval_SaveThread();
        if (self->invalid)
            failed = ((cipher_decrypt)self->function)(to, &written, NULL, from, n, ad, ad_size, count, self->key);
        else failed = ((cipher_encrypt)self->function)(to, &written, from, n, ad, ad_size, NULL, count, self->key);
        if (state) PyEval_RestoreThread(state);
    }
    if (!failed) return made;
    Py_XDECREF(made);
    PyErr_SetNone(self->invalid ? self->invalid : PyExc_RuntimeError);
    return NULL;
}
static PyObject *cipher_call(Cipher *self, PyObject *args, PyObject *kwargs) {
    const char *nonce, *header;
    Py_ssize_t size, head;
    PyObject *text;
    if (kwargs && PyDict_GET_SIZE(kwargs)) return PyErr_Format(PyExc_TypeError, "a Cipher takes no keywords");
    if (!PyArg_ParseTuple(args, "y#Sy#", &nonce, &size, &text, &header, &head)) return NULL;
    if (size != RECORD_NONCE)
        return PyErr_Format(PyExc_ValueError, "a nonce of %zd bytes; it has %d", size, RECORD_NONCE);
    return cipher_apply(self, nonce, text, header, head);
}
static PyMethodDef cipher_methods[] = {
    {"forget", (PyCFunction)cipher_forget, METH_NOARGS, "Overwrite the key. Every further call raises ForkedProcess."},
    {NULL, NULL, 0, NULL}};
static PyMemberDef cipher_members[] = {{"__weaklistoffset__", T_PYSSIZET, offsetof(Cipher, weak), READONLY, NULL},
                                       {NULL, 0, 0, 0, NULL}};
static PyType_Slot cipher_slots[] = {{Py_tp_new, PyType_GenericNew},
                                     {Py_tp_methods, cipher_methods},
                                     {Py_tp_members, cipher_members},
                                     {Py_tp_init, cipher_init},
                                     {Py_tp_dealloc, cipher_dealloc},
                                     {Py_tp_call, cipher_call},
                                     {Py_tp_traverse, cipher_traverse},
                                     {Py_tp_clear, cipher_clear},
                                     {Py_tp_doc,
                                      (char *)"One direction of AES-256-GCM by libsodium: Cipher(capsule with its "
                                              "function, key) encrypts, and with what is raised for "
                                              "what does not open as a third argument it decrypts. Called with (nonce, "
                                              "text, authenticated); all are bytes."},
                                     {0, NULL}};
PyType_Spec cipher_spec = {.name = "zcactor.native._hot.Cipher",
                           .basicsize = sizeof(Cipher),
                           .slots = cipher_slots,
                           .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_HAVE_GC};

int direction_init(Direction *self, PyObject *apply, PyObject *turn, uint64_t count, uint64_t until) {
    if (until < count || !PyCallable_Check(turn)) {
        PyErr_Format(PyExc_TypeError, "keys come with the record of the next key, not before the count, and turn()");
        return -1;
    }
    self->apply = Py_NewRef(apply);
    self->turn = Py_NewRef(turn);
    self->count = count;
    self->until = until;
    return 0;
}
void direction_clear(Direction *self) {
    Py_CLEAR(self->apply);
    Py_CLEAR(self->turn);
}
/* Have the next key: 0, or -1 with an exception. No record is made under the former key after that. */
static int direction_turn(Direction *self) {
    PyObject *turned = PyObject_CallNoArgs(self->turn), *apply;
    unsigned long long until;
    if (!turned) return -1;
    int bad = !PyTuple_Check(turned) || !PyArg_ParseTuple(turned, "OK", &apply, &until) || until <= self->count;
    if (bad && !PyErr_Occurred())
        PyErr_Format(PyExc_TypeError, "turn() gives a function and the record of the key after its own");
    if (!bad) {
        Py_XSETREF(self->apply, Py_NewRef(apply));
        self->until = until;
    }
    Py_DECREF(turned);
    return -bad;
}
/* Apply the key of the next record to `text`; its plain text has `nbytes`. Other threads may run meanwhile: `text` is a
 * bytes object, so that they cannot write to it, and they do not use `direction`. */
PyObject *seal_apply(const State *state, Direction *direction, PyObject *text, uint32_t nbytes) {
    char nonce[RECORD_NONCE] = {0}, header[RECORD_HEAD];
    if (direction->count >= direction->until && direction_turn(direction) < 0) return NULL;
    PyObject *apply = direction->apply;
    PUT(uint64_t, nonce + 4, direction->count);
    PUT(uint32_t, header, nbytes);
    if (Py_TYPE(apply) == state->cipher_type) {
        direction->count++; /* before the result is known, so that no nonce is used twice */
        return cipher_apply((Cipher *)apply, nonce, text, header, RECORD_HEAD);
    }
    PyObject *stack[4] = {NULL, PyBytes_FromStringAndSize(nonce, sizeof nonce), text,
                          PyBytes_FromStringAndSize(header, RECORD_HEAD)};
    PyObject *result = NULL;
    if (stack[1] && stack[3]) {
        direction->count++;
        result = PyObject_Vectorcall(apply, stack + 1, 3 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    }
    Py_XDECREF(stack[1]);
    Py_XDECREF(stack[3]);
    if (result && !PyBytes_Check(result)) {
        Py_CLEAR(result);
        PyErr_SetString(PyExc_TypeError, "sealing gives bytes");
    }
    return result;
}
