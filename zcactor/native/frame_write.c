/* Sent plain frames: the values are checked and leased, the frame is written, and its effects are booked; see
 * zcactor/rpc/codec.py. */
#include "hot.h"

int get_u64(PyObject *object, PyObject *name, uint64_t *value) {
    PyObject *number = PyObject_GetAttr(object, name);
    if (!number) return -1;
    *value = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    return PyErr_Occurred() ? -1 : 0;
}
/* Whether an attribute is that very object; -1 with an exception. */
int is_attr(PyObject *object, PyObject *name, PyObject *wanted) {
    PyObject *value = PyObject_GetAttr(object, name);
    if (!value) return -1;
    int is = value == wanted;
    Py_DECREF(value);
    return is;
}
/* Whether a block is of our store, sealed and exported; -1 with an exception. */
static int is_shared(Wire *self, PyObject *block) {
    int is = is_attr(block, self->state->str_store, self->given[STORE]);
    if (is > 0) is = is_attr(block, self->state->str_sealed, Py_True);
    if (is > 0) is = is_attr(block, self->state->str_exported, Py_True);
    return is;
}
/* The block that this array was shared as for another frame, if it is that array still; NULL with or without an
 * exception. */
static PyObject *shared_before(Wire *self, const Frame *frame, PyArrayObject *array, const Laid *laid) {
    const Shared *shared = frame->shared;
    if (!self->arena_nbytes || !shared || !shared->block || PyArray_ISWRITEABLE(array) || shared->data != laid->data ||
        shared->nbytes != laid->nbytes || (PyObject *)Py_TYPE(shared->block) != self->given[BLOCK_TYPE])
        return NULL;
    PyObject *block = Py_NewRef(shared->block);
    if (is_shared(self, block) <= 0) Py_CLEAR(block);
    return block;
}
/* The reference to an array of our store: 1 done, 0 Python must look at it, -1 an exception. */
static int refer(Wire *self, Frame *frame, PyArrayObject *array, Laid *laid) {
    PyObject *root = PyArray_BASE(array), *block = NULL;
    while (root && PyArray_Check(root)) root = PyArray_BASE((PyArrayObject *)root);
    if (root && (PyObject *)Py_TYPE(root) != self->given[BLOCK_TYPE]) return 0;
    if (root && !PyArray_ISWRITEABLE(array) && self->arena_nbytes) { /* of 0 bytes: the peer keeps copies by id */
        Py_INCREF(root);
        int shared = is_shared(self, root);
        if (shared > 0) block = root;
        else Py_DECREF(root);
        if (shared < 0) return -1;
    }
    if (!block && !(block = shared_before(self, frame, array, laid)) && PyErr_Occurred()) return -1;
    if (!block && !(block = PyObject_CallFunction(self->given[SHARE], "OKn", array,
                                                  (unsigned long long)(uintptr_t)PyArray_DATA(array),
                                                  (Py_ssize_t)PyArray_NBYTES(array))))
        return -1;
    uint64_t address;
    if (block == Py_None || get_u64(block, self->state->str_id, &laid->id) < 0 ||
        get_u64(block, self->state->str_offset, &laid->offset) < 0 ||
        get_u64(block, self->state->str_address, &address) < 0) {
        Py_DECREF(block);
        return PyErr_Occurred() ? -1 : 0;
    }
    laid->offset += (uint64_t)(uintptr_t)laid->data -
                    address; /* as it was checked: `is_as_laid` compares it again */
    laid->block = block;
    if (frame->shared && frame->shared->block != block) {
        Py_XDECREF(frame->shared->block);
        frame->shared->block = Py_NewRef(block);
        frame->shared->data = laid->data;
        frame->shared->nbytes = laid->nbytes;
    }
    return 1;
}
#define ARRAY_MOST                                                                                     \
    (4 + 2 + 1 + MAX_CODE + 1 + MAX_DIMS * 9 + 1) /* bytes of an array's extension beside its elements \
                                                   */
#define BESIDE_WHOLE 1024 /* bytes beside a whole array of the eager limit; zcactor.transport.frames has room */
#define MAX_INLINE 60000 /* bytes of an array within the frame: its extension's length has 16 bits */

/* Check an array and own all objects that its frame needs: 1 done, 0 Python must look at it, -1 an exception. Its
 * bytes go into the frame when zcactor.marshal.packing.Packing._inline would write them there, too. */
static int lay(Wire *self, Frame *frame, Py_ssize_t index, PyArrayObject *array) {
    Laid *laid = frame->laid + index;
    memset(laid, 0, sizeof *laid);
    frame->filled[frame->nfilled++] = (int)index;
    laid->descr = (PyArray_Descr *)Py_NewRef(PyArray_DESCR(array));
    laid->data = PyArray_DATA(array);
    laid->nbytes = PyArray_NBYTES(array);
    PyObject *metadata = PyDataType_METADATA(laid->descr);
    if (metadata && metadata != Py_None) return 0; /* a dtype without it is equal, and would be found */
    PyObject *code = PyDict_GetItemWithError(self->given[CODES], (PyObject *)laid->descr);
    if (!code || !PyUnicode_CheckExact(code) || !PyUnicode_IS_COMPACT_ASCII(code) ||
        PyUnicode_GET_LENGTH(code) > MAX_CODE)
        return PyErr_Occurred() ? -1 : 0;
    laid->code = Py_NewRef(code);
    if (!PyArray_ISWRITEABLE(array)) { /* Python raises the error for one that takes a group's result */
        int claimed = is_claimed(self->state, (PyObject *)array);
        if (claimed) return claimed < 0 ? -1 : 0;
    }
    if (!PyArray_IS_C_CONTIGUOUS(array) || PyArray_NDIM(array) > MAX_DIMS) return 0;
    frame->most += ARRAY_MOST;
    if (laid->nbytes < self->eager_limit || frame->whole) {
        frame->most += 5 + laid->nbytes;
        return laid->nbytes <= MAX_INLINE;
    }
    if (frame->nreferences == MAX_ARRAYS) return 0;
    frame->nreferences++;
    return refer(self, frame, array, laid);
}
/* A promise that is announced to the peer: 1 done, 0 Python must look at it, -1 an exception. */
static int lay_promise(Wire *self, Frame *frame, Py_ssize_t index, PyObject *promise) {
    Laid *laid = frame->laid + index;
    memset(laid, 0, sizeof *laid);
    frame->filled[frame->nfilled++] = (int)index;
    laid->promise = 1;
    if (get_u64(promise, self->state->str_id, &laid->id) < 0 ||
        get_u64(promise, self->state->str_key, &laid->offset) < 0 ||
        !(laid->code = PyObject_GetAttr(promise, self->state->str_label)))
        return -1;
    if (!PyUnicode_CheckExact(laid->code) || !PyUnicode_IS_COMPACT_ASCII(laid->code) ||
        PyUnicode_GET_LENGTH(laid->code) > MAX_LABEL || frame->nreferences == MAX_ARRAYS)
        return 0;
    frame->nreferences++;
    frame->npromises++;
    frame->most += 8 + PyUnicode_GET_LENGTH(laid->code);
    return 1;
}
static char *put_promise(char *p, const Laid *laid, int index) {
    char *head = p;
    p += 3;
    *p++ = (char)0x93;
    *p++ = (char)index;
    p = put_plain(p, laid->code);
    *p++ = (char)0xc2;
    head[0] = (char)0xc7;
    head[1] = (char)(p - head - 3);
    head[2] = EXT_ARGUMENT;
    return p;
}
static int is_as_laid(const Laid *laid, PyArrayObject *array) {
    return PyArray_DESCR(array) == laid->descr && PyArray_DATA(array) == laid->data &&
           PyArray_NBYTES(array) == laid->nbytes && PyArray_IS_C_CONTIGUOUS(array) && PyArray_NDIM(array) <= MAX_DIMS;
}
static char *put_shape(char *p, PyArrayObject *array) {
    *p++ = (char)(0x90 | PyArray_NDIM(array));
    for (int i = 0; i < PyArray_NDIM(array); i++) p = put_big(p, 0xcf, (uint64_t)PyArray_DIM(array, i), 8);
    return p;
}
static char *put_array(char *p, const Laid *laid, PyArrayObject *array, int index) {
    char *head = p;
    p += 3;
    *p++ = (char)0x93;
    *p++ = (char)index;
    p = put_shape(put_plain(p, laid->code), array);
    head[0] = (char)0xc7;
    head[1] = (char)(p - head - 3);
    head[2] = EXT_ARRAY;
    return p;
}
static char *put_inline(char *p, const Laid *laid, PyArrayObject *array) {
    char *head = p;
    p += 4;
    *p++ = (char)0x94;
    p = put_sized(p, laid->data, laid->nbytes, 0xc4, 0xc5, 0xc6);
    p = put_shape(put_plain(p, laid->code), array);
    *p++ = (char)0xc2; /* read-only where it arrives */
    put_big(head, 0xc8, (uint64_t)(p - head - 4), 2);
    head[3] = EXT_INLINE_ARRAY;
    return p;
}
/* Write the bytes before the payload, with the first `nreleases` releases. */
static void put_head(Wire *self, const Frame *frame, char *at, Py_ssize_t head, Py_ssize_t size, int nreleases) {
    int nregions = frame->nreferences;
    memset(at, 0, (size_t)head);
    PUT(uint32_t, at, size - 4);
    memcpy(at + 4, self->state->constant, CONSTANT_NBYTES);
    PUT(uint32_t, at + AT_RELEASES_OFFSET, 44 + REGION_NBYTES * nregions);
    PUT(uint32_t, at + AT_PAYLOAD_OFFSET, 44 + REGION_NBYTES * nregions + RELEASE_NBYTES * nreleases);
    PUT(uint64_t, at + AT_ID, frame->id);
    PUT(uint32_t, at + AT_ACTOR, frame->actor);
    PUT(uint16_t, at + AT_CODE, frame->code);
    PUT(uint16_t, at + AT_CREDITS, self->credits->owed);
    PUT(uint64_t, at + AT_EXTRA, frame->extra);
    at[AT_KIND] = (char)frame->kind;
    at[AT_FLAGS] = (char)frame->flags;
    PUT(uint32_t, at + AT_NREGIONS, nregions);
    char *q = at + AT_REGIONS;
    for (int i = 0; i < frame->nfilled; i++) {
        const Laid *laid = frame->laid + frame->filled[i];
        if (!laid->block && !laid->promise) continue;
        memcpy(q, self->process, 16);
        PUT(uint64_t, q + 16, laid->id);
        PUT(uint64_t, q + 24, laid->offset);
        PUT(uint64_t, q + 32, laid->nbytes);
        if (laid->promise) q[48] = REGION_REF;
        q += REGION_NBYTES;
    }
    PUT(uint32_t, q + 4, nreleases);
    q += 8;
    for (int i = 0; i < nreleases; i++, q += RELEASE_NBYTES) {
        PUT(uint64_t, q, self->released[i]);
        PUT(uint32_t, q + 8, 1);
    }
    PUT(uint32_t, q, frame->payload);
}
/* 1 when frames wait for a credit, which nothing may overtake, or all frames are Python's; -1 with an exception. */
int has_backlog(Wire *self) {
    if (self->out->declines) return 1;
    Py_ssize_t n = PyObject_Size(self->given[BACKLOG]);
    return n < 0 ? -1 : n > 0;
}
/* Check the values, and lease arrays by reference to the peer: 1 done, 0 Python must write the frame, -1 an
 * exception. */
static int prepare_frame(Wire *self, Frame *frame) {
    if (frame->count > MAX_VALUES) return 0;
    frame->most = 1;
    /* No array is closed for a frame that Python has to write because of another value: that may fail. */
    int arrays[MAX_VALUES], promises[MAX_VALUES];
    for (Py_ssize_t i = 0; i < frame->count; i++) {
        if ((arrays[i] = is_array(frame->values[i])) < 0) return -1;
        promises[i] = (PyObject *)Py_TYPE(frame->values[i]) == self->given[ANNOUNCED_TYPE];
        if (arrays[i] || promises[i]) continue;
        Py_ssize_t n = plain_size(frame->values[i]);
        if (n < 0) return 0;
        frame->most += n;
    }
    for (Py_ssize_t i = 0; i < frame->count; i++) {
        int laid = arrays[i]     ? lay(self, frame, i, (PyArrayObject *)frame->values[i])
                   : promises[i] ? lay_promise(self, frame, i, frame->values[i])
                                 : 1;
        if (laid <= 0) return laid;
    }
    if (frame->most > self->eager_limit + (frame->whole ? BESIDE_WHOLE : 0)) return 0;
    /* Before any thread can send the frame, so that no lease is missing when the peer releases it. */
    for (; frame->ngranted < frame->nfilled; frame->ngranted++) {
        const Laid *laid = frame->laid + frame->filled[frame->ngranted];
        if (!laid->block) continue;
        PyObject *number = PyLong_FromUnsignedLongLong(laid->id);
        PyObject *granted =
            number ? PyObject_CallMethodObjArgs(self->given[LEASES], self->state->str_grant, number, laid->block, NULL)
                   : NULL;
        Py_XDECREF(number);
        if (!granted) return -1;
        Py_DECREF(granted);
    }
    return 1;
}
/* Reserve room for the frame with up to `nreleases`. On slots it may run Python. 1 done, 0 Python must write it, -1
 * an exception. */
static int frame_room(Wire *self, Py_ssize_t nbytes) {
    SendBuffer *out = self->out;
    if (nbytes > out->max_reserve) return 0;
    if (buffer_room(out, nbytes)) return 1;
    const int closed = out->refused && PyErr_ExceptionMatches(self->state->connection_lost);
    if (!closed && !PyErr_ExceptionMatches(PyExc_BlockingIOError)) return -1;
    PyErr_Clear(); /* closed meanwhile, or the slots' owner is inside of a change of them */
    return 0;
}
/* Commit the frame at the buffer's tail, with the first releases and the owed credits. */
static void book_frame(Wire *self, const Frame *frame, Py_ssize_t size, int nreleases) {
    self->out->tail += size;
    self->out->committed++;
    self->credits->owed = 0;
    self->nreleased -= nreleases;
    if (self->nreleased)
        memmove(self->released, self->released + nreleases, (size_t)self->nreleased * sizeof *self->released);
    self->counters->frames_sent++;
    self->counters->bytes_eager += (unsigned long long)frame->payload;
}
/* Write a prepared frame. The reservation may run Python. After the last check of it no Python runs. */
static int commit_frame(Wire *self, Frame *frame, PyObject **removed) {
    SendBuffer *out = self->out;
    Credits *credits = self->credits;
    int nreleases = (int)self->nreleased;
    Py_ssize_t nbytes = HEAD + REGION_NBYTES * frame->nreferences + RELEASE_NBYTES * nreleases + frame->most + 8;
    int room = frame_room(self, nbytes);
    if (room > 0 && frame->call) { /* entered before the frame can be answered */
        if (PyObject_SetAttr(frame->call, self->state->str_state, self->state->state_sent) < 0) return -1;
        room = frame_room(self, nbytes);
    }
    if (room <= 0) return room;
    if (out->refused || credits->available <= 0) return PYTHON;
    int waits = has_backlog(self);
    if (waits) return waits < 0 ? -1 : PYTHON;
    if (self->nreleased < nreleases)
        nreleases = (int)self->nreleased; /* another frame has taken them; the next one takes later ones */
    PyObject *entry = NULL;
    if (frame->table) {
        entry = PyDict_GetItemWithError(frame->table, frame->key);
        if (!entry || (frame->call && entry != frame->call)) return PyErr_Occurred() ? -1 : GONE;
    }
    for (int i = 0; i < frame->nfilled; i++)
        if (!frame->laid[frame->filled[i]].promise && !is_as_laid(frame->laid + frame->filled[i], (PyArrayObject *)frame->values[frame->filled[i]]))
            return PYTHON;
    Py_ssize_t head = HEAD + REGION_NBYTES * frame->nreferences + RELEASE_NBYTES * nreleases;
    char *at = out->data + out->tail, *p = at + head;
    int index = 0;
    if (frame->array) *p++ = (char)(0x90 | frame->count);
    for (Py_ssize_t i = 0; i < frame->count; i++) {
        PyObject *value = frame->values[i];
        if (!WAS_ARRAY(value))
            p = (PyObject *)Py_TYPE(value) == self->given[ANNOUNCED_TYPE] ? put_promise(p, frame->laid + i, index++)
                                                                          : put_plain(p, value);
        else if (frame->laid[i].block) p = put_array(p, frame->laid + i, (PyArrayObject *)value, index++);
        else p = put_inline(p, frame->laid + i, (PyArrayObject *)value);
        if (!p) return PYTHON;
    }
    frame->payload = p - at - head;
    Py_ssize_t size = (head + frame->payload + 7) & ~(Py_ssize_t)7;
    memset(p, 0, (size_t)(at + size - p));
    put_head(self, frame, at, head, size, nreleases);
    if (entry && !frame->call) {
        *removed = Py_NewRef(entry); /* freeing it may run Python, so do that later */
        if (PyDict_DelItem(frame->table, frame->key) < 0) return -1;
    }
    credits->available--;
    book_frame(self, frame, size, nreleases);
    for (int i = 0; i < frame->ngranted; i++) {
        const Laid *laid = frame->laid + frame->filled[i];
        if (laid->block) self->counters->bytes_lent += (unsigned long long)laid->nbytes;
    }
    return WRITTEN;
}
/* Release the leases of a frame that was not written. An exception that is set stays set. */
static int withdraw(Wire *self, const Frame *frame) {
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    for (int i = 0; i < frame->ngranted; i++) {
        const Laid *laid = frame->laid + frame->filled[i];
        if (!laid->block) continue;
        PyObject *number = PyLong_FromUnsignedLongLong(laid->id);
        PyObject *done =
            number ? PyObject_CallMethodOneArg(self->given[LEASES], self->state->str_withdraw, number) : NULL;
        Py_XDECREF(number);
        if (!done) {
            Py_XDECREF(type);
            Py_XDECREF(error);
            Py_XDECREF(traceback);
            return -1;
        }
        Py_DECREF(done);
    }
    if (type) {
        PyErr_Clear();
        PyErr_Restore(type, error, traceback);
    }
    return 0;
}
/* Write one plain frame at the buffer's tail, and book leases, releases and credits: WRITTEN; PYTHON when Python
 * must write it (no credit, refused, too large, not plain, an array outside the store); GONE when its entry has left
 * its table meanwhile; -1 with an exception, when nothing was written. */
int write_frame(Wire *self, Frame *frame) {
    frame->nfilled = frame->nreferences = frame->ngranted = frame->npromises = 0;
    frame->flags = 0;
    if (self->out->refused || self->credits->available <= 0 || self->nreleased > MAX_RELEASES) return PYTHON;
    PyObject *removed = NULL;
    int done = prepare_frame(self, frame);
    if (done > 0) done = self->nreleased > MAX_RELEASES ? PYTHON : commit_frame(self, frame, &removed);
    if (done != WRITTEN && frame->ngranted && withdraw(self, frame) < 0) done = -1;
    for (int i = 0; i < frame->nfilled; i++) {
        Laid *laid = frame->laid + frame->filled[i];
        Py_XDECREF(laid->code);
        Py_XDECREF(laid->descr);
        Py_XDECREF(laid->block);
    }
    Py_XDECREF(removed);
    return done;
}

/* frame(kind, flags, code, actor, id, extra, payload): write one frame without regions, which takes no credit.
 * False: Python must write it, and nothing was done. */
PyObject *wire_frame(Wire *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 7) {
        PyErr_SetString(PyExc_TypeError, "frame(kind, flags, code, actor, id, extra, payload)");
        return NULL;
    }
    if (!wire_is_whole(self)) return NULL;
    static const uint64_t most[6] = {0xff, 0xff, 0xffff, 0xffffffff, UINT64_MAX, UINT64_MAX};
    uint64_t fields[6];
    for (int i = 0; i < 6; i++) {
        fields[i] = PyLong_AsUnsignedLongLong(args[i]);
        if (fields[i] == UINT64_MAX && PyErr_Occurred()) {
            if (!PyErr_ExceptionMatches(PyExc_OverflowError)) return NULL;
            PyErr_Clear(); /* Python raises the error */
            Py_RETURN_FALSE;
        }
        if (fields[i] > most[i]) Py_RETURN_FALSE;
    }
    if (!PyBytes_CheckExact(args[6]) || self->out->declines || self->out->refused || self->nreleased > MAX_RELEASES)
        Py_RETURN_FALSE;
    Frame frame;
    frame.kind = (int)fields[0];
    frame.flags = (int)fields[1];
    frame.code = fields[2];
    frame.actor = (uint32_t)fields[3];
    frame.id = fields[4];
    frame.extra = fields[5];
    frame.nfilled = frame.nreferences = 0;
    frame.payload = PyBytes_GET_SIZE(args[6]);
    int nreleases = (int)self->nreleased;
    int room = frame_room(self, HEAD + RELEASE_NBYTES * nreleases + frame.payload + 8); /* on slots this runs Python */
    if (room < 0) return NULL;
    if (!room || self->out->refused) Py_RETURN_FALSE;
    if (self->nreleased < nreleases) nreleases = (int)self->nreleased;
    Py_ssize_t head = HEAD + RELEASE_NBYTES * nreleases, size = (head + frame.payload + 7) & ~(Py_ssize_t)7;
    char *at = self->out->data + self->out->tail;
    memcpy(at + head, PyBytes_AS_STRING(args[6]), (size_t)frame.payload);
    memset(at + head + frame.payload, 0, (size_t)(size - head - frame.payload));
    put_head(self, &frame, at, head, size, nreleases);
    book_frame(self, &frame, size, nreleases);
    Py_RETURN_TRUE;
}
