/* Received plain frames: a frame is read, checked, leased, and passed to its call or its host; see
 * zcactor/rpc/codec.py. */
#include "hot.h"

typedef struct { /* an array among the arguments, which is not made yet */
    Py_ssize_t place;
    int region, nd;
    npy_intp dims[MAX_DIMS];
    PyArray_Descr *dtype; /* owned */
    PyObject *label;      /* of a promise, owned; NULL: an array */
} Found;
typedef struct {    /* the content of a plain frame */
    PyObject *list; /* without arrays by reference */
    Found found[MAX_ARRAYS];
    int nfound, npromises;
} Values;

/* Read dtype and shape of an array's extension, and compute its bytes: 1 done, and the caller releases the dtype; 0
 * Python must look at it. NumPy refuses a shape whose axes, without those of length 0, make more elements than it
 * can count, and allocates bytes for elements of size 0: in these cases Python makes a ProtocolError, or the array. */
static int get_layout(Wire *self, const unsigned char **at, const unsigned char *end, Found *found, uint64_t *nbytes) {
    const unsigned char *p = *at;
    PyObject *code = p < end && (*p & 0xe0) == 0xa0 ? get_plain(&p, end) : NULL;
    if (!code) return 0;
    PyArray_Descr *dtype = (PyArray_Descr *)PyDict_GetItemWithError(self->given[DTYPES], code);
    Py_DECREF(code);
    if (!dtype || !PyArray_API || p >= end || (*p & 0xf0) != 0x90 || (*p & 15) > MAX_DIMS) return 0;
    found->nd = *p++ & 15;
    uint64_t sum = (uint64_t)PyDataType_ELSIZE(dtype);
    int empty = 0;
    if (sum == 0) return 0;
    for (int i = 0; i < found->nd; i++) {
        uint64_t n;
        if (p < end && *p < 0x80) n = *p++;
        else if (end - p > 1 && *p == 0xcc) {
            n = p[1];
            p += 2;
        } else if (end - p > 2 && *p == 0xcd) {
            n = get_big(p + 1, 2);
            p += 3;
        } else if (end - p > 4 && *p == 0xce) {
            n = get_big(p + 1, 4);
            p += 5;
        } else if (end - p > 8 && *p == 0xcf) {
            n = get_big(p + 1, 8);
            p += 9;
        } else return 0;
        if (n == 0) empty = 1;
        else if (__builtin_mul_overflow(sum, n, &sum) || sum > INT64_MAX) return 0;
        found->dims[i] = (npy_intp)n;
    }
    *nbytes = empty ? 0 : sum;
    found->dtype = (PyArray_Descr *)Py_NewRef(dtype);
    *at = p;
    return 1;
}
/* Read an array extension at *at: 1 done, 0 Python must look at it. */
static int get_array(Wire *self, const unsigned char **at, const unsigned char *end, const unsigned char *regions,
                     int nregions, Found *found) {
    const unsigned char *p = *at;
    uint64_t nbytes;
    if (end - p < 6 || p[0] != 0xc7 || p[2] != EXT_ARRAY || end - p < 3 + p[1]) return 0;
    end = p + 3 + p[1];
    p += 3;
    if (end - p < 4 || p[0] != 0x93 || p[1] >= nregions) return 0;
    found->region = p[1];
    p += 2;
    if (!get_layout(self, &p, end, found, &nbytes)) return 0;
    const unsigned char *region = regions + REGION_NBYTES * found->region;
    if (p != end || region[48] || nbytes == 0 || nbytes != GET(uint64_t, region + 32)) {
        Py_CLEAR(found->dtype);
        return 0;
    }
    found->label = NULL;
    *at = end;
    return 1;
}
/* The extension of a promise that is announced, at *at: 1 read, and the label is the caller's to let go of; 0 Python
 * must look at it. */
static int get_promise(const unsigned char **at, const unsigned char *end, const unsigned char *regions, int nregions,
                       Found *found) {
    const unsigned char *p = *at;
    if (end - p < 7 || p[0] != 0xc7 || p[2] != EXT_ARGUMENT || end - p < 3 + p[1]) return 0;
    end = p + 3 + p[1];
    p += 3;
    if (end - p < 4 || p[0] != 0x93 || p[1] >= nregions || regions[REGION_NBYTES * p[1] + 48] != REGION_REF) return 0;
    found->region = p[1];
    p += 2;
    PyObject *label = get_plain(&p, end);
    if (!label) return 0;
    if (!PyUnicode_CheckExact(label) || end - p != 1 || *p != 0xc2) {
        Py_DECREF(label);
        return 0;
    }
    found->label = label;
    found->dtype = NULL;
    *at = end;
    return 1;
}
/* Make an array from bytes within the frame, as a copy. With `ours` it can be written to. NULL without an exception:
 * Python must look at it. */
static PyObject *get_inline(Wire *self, const unsigned char **at, const unsigned char *end, int ours) {
    const unsigned char *p = *at;
    Py_ssize_t length, head = end - p > 2 && p[0] == 0xc7 ? 3 : 4;
    if (end - p < 4 || (p[0] != 0xc7 && p[0] != 0xc8) || p[head - 1] != EXT_INLINE_ARRAY) return NULL;
    length = (Py_ssize_t)get_big(p + 1, (int)head - 2);
    if (end - p - head < length) return NULL;
    end = p + head + length;
    p += head;
    if (end - p < 4 || *p++ != 0x94) return NULL;
    Py_ssize_t n = -1, left = end - p - 3;
    if (p[0] == 0xc4) {
        n = p[1];
        p += 2;
        left += 1;
    } else if (p[0] == 0xc5) {
        n = (Py_ssize_t)get_big(p + 1, 2);
        p += 3;
    }
    if (n < 0 || n > left) return NULL;
    const unsigned char *bytes = p;
    p += n;
    Found found;
    uint64_t nbytes;
    if (!get_layout(self, &p, end, &found, &nbytes)) return NULL;
    if (end - p != 1 || (*p != 0xc2 && *p != 0xc3) || nbytes != (uint64_t)n) {
        Py_DECREF(found.dtype);
        return NULL;
    }
    PyObject *array = PyArray_NewFromDescr(&PyArray_Type, found.dtype, found.nd, found.dims, NULL, NULL, 0, NULL);
    if (!array) return NULL;
    memcpy(PyArray_DATA((PyArrayObject *)array), bytes, (size_t)n);
    if (*p == 0xc2 && !ours) PyArray_CLEARFLAGS((PyArrayObject *)array, NPY_ARRAY_WRITEABLE);
    *at = end;
    return array;
}
static void drop_values(Values *values) {
    Py_CLEAR(values->list);
    while (values->nfound > 0) {
        Found *found = values->found + --values->nfound;
        Py_XDECREF(found->dtype);
        Py_XDECREF(found->label);
    }
}
/* Read `count` values that are plain, arrays or, with `promises`, announced promises: 1 done, 0 Python must read
 * them, -1 an exception. Values by reference are only noted: nothing is leased yet. With `ours` nobody else gets
 * them: they are arguments. */
static int read_values(Wire *self, Values *values, const unsigned char *p, const unsigned char *end, Py_ssize_t count,
                       const unsigned char *regions, int nregions, int promises, int ours) {
    if (nregions > MAX_ARRAYS) return 0;
    for (int i = 0; i < nregions; i++) { /* every reference is checked before any is used */
        const unsigned char *region = regions + REGION_NBYTES * i;
        uint64_t offset = GET(uint64_t, region + 24), nbytes = GET(uint64_t, region + 32);
        uint16_t kind = GET(uint16_t, region + 48); /* and authenticate */
        if (memcmp(region, self->peer, 16) || GET(uint64_t, region + 40)) return 0;
        if (kind == REGION_REF) {
            if (!promises || !offset || nbytes) return 0;
        } else if (kind || offset > self->arena_nbytes || nbytes > self->arena_nbytes - offset) return 0;
    }
    if (!(values->list = PyList_New(count))) return -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *value = NULL;
        if (p < end && (*p == 0xc7 || *p == 0xc8) && (value = get_inline(self, &p, end, ours))) {
            /* done */
        } else if (PyErr_Occurred()) {
            /* out of memory */
        } else if (p < end && *p == 0xc7) {
            Found *found = values->found + values->nfound;
            if (values->nfound < nregions && (get_array(self, &p, end, regions, nregions, found) ||
                                              (promises && get_promise(&p, end, regions, nregions, found)))) {
                values->nfound++;
                values->npromises += found->label != NULL;
                found->place = i;
                if (found->region == values->nfound - 1) value = Py_NewRef(Py_None);
            }
        } else value = get_plain(&p, end);
        if (!value) return PyErr_Occurred() ? -1 : 0;
        PyList_SET_ITEM(values->list, i, value);
    }
    return p == end && values->nfound == nregions;
}
/* Make the arrays that were noted, each over a lease, and the promises, for which argument(id, key, label) makes
 * the values of arguments: 0, or -1 with an exception. */
static int lease_values(Wire *self, Values *values, const unsigned char *regions) {
    for (int i = 0; i < values->nfound; i++) {
        Found *found = values->found + i;
        const unsigned char *region = regions + REGION_NBYTES * i;
        uint64_t nbytes = GET(uint64_t, region + 32), address = 0;
        if (found->label) {
            PyObject *argument =
                PyObject_CallFunction(self->given[ARGUMENT], "KKO", (unsigned long long)GET(uint64_t, region + 16),
                                      (unsigned long long)GET(uint64_t, region + 24), found->label);
            if (!argument) return -1;
            PyList_SetItem(values->list, found->place, argument);
            continue;
        }
        PyObject *lease =
            PyObject_CallFunction(self->given[LEASE], "KKK", (unsigned long long)GET(uint64_t, region + 16),
                                  (unsigned long long)GET(uint64_t, region + 24), (unsigned long long)nbytes);
        PyObject *array = NULL;
        if (lease && get_u64(lease, self->state->str_address, &address) == 0) {
            array = PyArray_NewFromDescr(&PyArray_Type, (PyArray_Descr *)Py_NewRef(found->dtype), found->nd,
                                         found->dims, NULL, (void *)(uintptr_t)address,
                                         NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED, NULL);
        }
        if (array && PyArray_SetBaseObject((PyArrayObject *)array, Py_NewRef(lease)) < 0) Py_CLEAR(array);
        if (array) PyArray_UpdateFlags((PyArrayObject *)array, NPY_ARRAY_UPDATE_ALL);
        Py_XDECREF(lease);
        if (!array) return -1;
        int again = 0; /* the same object, offset and bytes: mapped once, however often the frame names them */
        for (int j = 0; j < i && !again; j++) again = !memcmp(region + 16, regions + REGION_NBYTES * j + 16, 24);
        if (!again) self->counters->bytes_mapped += nbytes;
        PyList_SetItem(values->list, found->place, array);
    }
    return 0;
}
/* Book the fields of a frame beside its payload: the credits that it returns, the credit that it takes, and the
 * leases that it releases. 0, or -1 with a ProtocolError. */
static int judge(Wire *self, int credits, const unsigned char *releases, uint64_t nreleases) {
    if (credits_do_consumed(self->credits, 1) < 0 || (credits && credits_do_returned(self->credits, credits) < 0))
        return -1;
    for (uint64_t i = 0; i < nreleases; i++, releases += RELEASE_NBYTES) {
        PyObject *number = PyLong_FromUnsignedLongLong(GET(uint64_t, releases)),
                 *times = PyLong_FromUnsignedLong(GET(uint32_t, releases + 8));
        PyObject *released = number && times ? PyObject_CallMethodObjArgs(self->given[LEASES], self->state->str_release,
                                                                          number, times, NULL)
                                             : NULL;
        Py_XDECREF(number);
        Py_XDECREF(times);
        if (!released) return -1;
        Py_DECREF(released);
    }
    return 0;
}
/* Complete the call that waits under `id`, unless code that ran meanwhile has ended it. `ran`: whether any code may
 * have run. */
static int complete(Wire *self, PyObject *id, PyObject *call, PyObject *value, int ran) {
    PyObject *pending = self->given[PENDING];
    if (ran && PyDict_GetItemWithError(pending, id) != call) return PyErr_Occurred() ? -1 : 0;
    if (PyDict_DelItem(pending, id) < 0) return -1;
    Py_INCREF(value);
    PyObject *done = PyObject_CallMethodOneArg(call, self->state->str_complete_plain, value);
    Py_DECREF(value);
    Py_XDECREF(done);
    return done ? 0 : -1;
}
/* Note which FORWARD frames of its call an answer has followed: 1 done, 0 Python refuses it, -1 an exception. */
static int note_pushed(Wire *self, PyObject *call, const unsigned char *frame) {
    uint64_t pushed = GET(uint64_t, frame + AT_EXTRA), forwarded;
    if (get_u64(call, self->state->str_forwarded, &forwarded) < 0) return -1;
    if (forwarded < 64 && pushed >> forwarded) return 0;
    PyObject *number = PyLong_FromUnsignedLongLong(pushed);
    int set = number ? PyObject_SetAttr(call, self->state->str_pushed, number) : -1;
    Py_XDECREF(number);
    return set < 0 ? -1 : 1;
}
/* taker(key, value, (), -1) of a group or a graph, where that is a function and no Seat that takes the value by itself;
 * or push(word, key, value) with the outcome of a promise that was passed to a call here. */
static int take_push(Wire *self, PyObject *taker, PyObject *word, PyObject *key, PyObject *value, uint64_t number) {
    if (taker && Py_TYPE(taker) == self->state->seat_type) {
        int taken = seat_take((Seat *)taker, number, value);
        if (taken) return taken < 0 ? -1 : 0;
        taker = ((Seat *)taker)->pushed;
        if (!taker) return 0; /* collected: nobody holds the group any more */
    }
    PyObject *parts = PyTuple_New(0), *flags = PyLong_FromLong(-1), *done = NULL;
    PyObject *args[5] = {NULL, key, value, parts, flags}, *outcome[4] = {NULL, word, key, value};
    const size_t room = PY_VECTORCALL_ARGUMENTS_OFFSET;
    Py_INCREF(value);
    Py_XINCREF(taker);
    if (taker && parts && flags) done = PyObject_Vectorcall(taker, args + 1, 4 | room, NULL);
    else if (!taker) done = PyObject_Vectorcall(self->given[PUSH], outcome + 1, 3 | room, NULL);
    Py_XDECREF(taker);
    Py_DECREF(value);
    Py_XDECREF(flags);
    Py_XDECREF(parts);
    Py_XDECREF(done);
    return done ? 0 : -1;
}
/* Keep a FORWARD frame for its call, which may follow in the batch: 1 done, -1 an exception. */
static int keep_forward(Wire *self, PyObject *id, unsigned int number, unsigned long long key, const char *target) {
    PyObject *ahead = self->given[AHEAD], *kept = Py_XNewRef(PyDict_GetItemWithError(ahead, id));
    if (!kept && !PyErr_Occurred() && (kept = PyList_New(0)) && PyDict_SetItem(ahead, id, kept) < 0) Py_CLEAR(kept);
    PyObject *forward = kept ? Py_BuildValue("(IKy#)", number, key, target, (Py_ssize_t)16) : NULL;
    int done = forward ? PyList_Append(kept, forward) : -1;
    Py_XDECREF(forward);
    Py_XDECREF(kept);
    return done < 0 ? -1 : 1;
}
/* Process a FORWARD frame: `early`, ahead of its turn, call forward(id, key, number, target) where its call is open,
 * otherwise keep it; in its turn book its fields. 1 done, 0 Python must look at it, -1 an exception. */
static int take_forward(Wire *self, const unsigned char *frame, int early, const unsigned char *releases,
                        uint64_t nreleases, uint64_t payload) {
    unsigned long long id = GET(uint64_t, frame + AT_ID), key = GET(uint64_t, frame + AT_EXTRA);
    unsigned int number = GET(uint16_t, frame + AT_CODE);
    if (!key || number >= MAX_FORWARDS || payload != 16 || GET(uint32_t, frame + AT_NREGIONS)) return 0;
    if (!early) return judge(self, GET(uint16_t, frame + AT_CREDITS), releases, nreleases) < 0 ? -1 : 1;
    const char *target = (const char *)releases + nreleases * RELEASE_NBYTES + 4;
    PyObject *name = PyLong_FromUnsignedLongLong(id);
    int open = name ? PyDict_Contains(self->given[OPEN], name) : -1, taken = -1;
    if (open > 0) {
        PyObject *done =
            PyObject_CallFunction(self->given[FORWARD], "KKIy#", id, key, number, target, (Py_ssize_t)payload);
        taken = done ? 1 : -1;
        Py_XDECREF(done);
    } else if (open == 0) taken = keep_forward(self, name, number, key, target);
    Py_XDECREF(name);
    return taken;
}
/* Call host.receive_plain(session, id, code, timeout_ns, arguments), or receive_linked(the same, forwards) for a
 * call with promises or FORWARD frames. Without a host call call(actor, id, code, timeout_ns, arguments). The
 * list is handed over, so that no reference of this function keeps an argument alive. 1, or -1 with an exception. */
static int take_call(Wire *self, const unsigned char *frame, PyObject *id, Values *values,
                     const unsigned char *regions) {
    PyObject *ahead = self->given[AHEAD], *forwards = NULL, *done = NULL, *host = NULL;
    if (PyDict_GET_SIZE(ahead)) {
        forwards = Py_XNewRef(PyDict_GetItemWithError(ahead, id));
        if (forwards ? PyDict_DelItem(ahead, id) < 0 : PyErr_Occurred() != NULL) {
            Py_XDECREF(forwards);
            return -1;
        }
    }
    if (lease_values(self, values, regions) < 0) {
        Py_XDECREF(forwards);
        return -1;
    }
    PyObject *actor = PyLong_FromUnsignedLong(GET(uint32_t, frame + AT_ACTOR)),
             *code = PyLong_FromLong(GET(uint16_t, frame + AT_CODE)),
             *timeout = PyLong_FromUnsignedLongLong(GET(uint64_t, frame + AT_EXTRA));
    int twice = actor && code && timeout ? PyDict_Contains(self->given[OPEN], id) : -1;
    if (twice > 0) PyErr_Format(self->state->protocol_error, "the peer opened call %S twice", id);
    if (!twice) host = Py_XNewRef(PyDict_GetItemWithError(self->given[HOSTS], actor));
    if (!twice && !PyErr_Occurred()) {
        PyObject *session = Py_NewRef(self->given[SESSION]), *list = values->list;
        values->list = NULL;
        PyObject *stack[7] = {host, session, id, code, timeout, list, forwards ? forwards : Py_None};
        if (host && (forwards || values->npromises))
            done = PyObject_VectorcallMethod(self->state->str_receive_linked, stack, 7, NULL);
        else if (host) done = PyObject_VectorcallMethod(self->state->str_receive_plain, stack, 6, NULL);
        else {
            PyObject *others[6] = {NULL, actor, id, code, timeout, list}, *callback = Py_NewRef(self->given[CALL]);
            done = PyObject_Vectorcall(callback, others + 1, 5 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
            Py_DECREF(callback);
        }
        Py_DECREF(session);
        Py_DECREF(list);
    }
    Py_XDECREF(forwards);
    Py_XDECREF(host);
    Py_XDECREF(timeout);
    Py_XDECREF(code);
    Py_XDECREF(actor);
    Py_XDECREF(done);
    return done ? 1 : -1;
}
/* Process one frame of `length` bytes behind its prefix: 1 done, 0 Python must do it, -1 an exception. The frame is
 * checked before anything is changed: a call whose answer is refused stays open, and ends with the connection.
 * `early` matters for a FORWARD frame. */
static int take_in(Wire *self, const unsigned char *frame, Py_ssize_t length, int early) {
    if (self->out->declines || memcmp(frame + 4, self->state->constant, SHARED_NBYTES) || frame[AT_FLAGS]) return 0;
    uint64_t room = (uint64_t)length + 4 - HEAD, nregions = GET(uint32_t, frame + AT_NREGIONS);
    if (nregions * REGION_NBYTES > room || GET(uint32_t, frame + AT_RELEASES_OFFSET) != 44 + nregions * REGION_NBYTES)
        return 0;
    room -= nregions * REGION_NBYTES;
    const unsigned char *regions = frame + AT_REGIONS, *releases = regions + nregions * REGION_NBYTES + 8;
    uint64_t nreleases = GET(uint32_t, releases - 4);
    if (nreleases * RELEASE_NBYTES > room ||
        GET(uint32_t, frame + AT_PAYLOAD_OFFSET) != 44 + nregions * REGION_NBYTES + nreleases * RELEASE_NBYTES)
        return 0;
    room -= nreleases * RELEASE_NBYTES;
    const unsigned char *p = releases + nreleases * RELEASE_NBYTES + 4, *end;
    uint64_t payload = GET(uint32_t, p - 4);
    if (payload > room) return 0;
    end = p + payload;
    int kind = frame[AT_KIND];
    if (kind == KIND_FORWARD) return take_forward(self, frame, early, releases, nreleases, payload);
    int arrays = (int)(nregions > MAX_ARRAYS ? MAX_ARRAYS + 1 : nregions);
    Py_ssize_t count = 1;
    if (kind == KIND_CALL && p < end && (*p & 0xf0) == 0x90) count = *p++ & 15;
    else if ((kind != KIND_RESPONSE && kind != KIND_PUSH) || GET(uint16_t, frame + AT_CODE) != STATUS_OK) return 0;
    if (kind == KIND_PUSH && GET(uint64_t, frame + AT_ID) == 0) return 0; /* Python refuses it */
    PyObject *call = NULL, *id = PyLong_FromUnsignedLongLong(GET(uint64_t, frame + AT_ID)), *word = NULL, *taker = NULL;
    if (!id) return -1;
    int listed = 0; /* a group takes several values, as a list */
    if (kind == KIND_PUSH) {
        word = PyLong_FromUnsignedLongLong(GET(uint64_t, frame + AT_EXTRA));
        taker = word ? Py_XNewRef(PyDict_GetItemWithError(self->given[TAKERS], word)) : NULL;
        if (taker && p < end && (*p & 0xf0) == 0x90) {
            listed = 1;
            count = *p++ & 15;
        }
    }
    if (PyErr_Occurred()) {
        Py_XDECREF(word);
        Py_DECREF(id);
        return -1;
    }
    Values values;
    values.list = NULL;
    values.nfound = values.npromises = 0;
    int taken = read_values(self, &values, p, end, count, regions, arrays,
                            kind == KIND_CALL && memcmp(self->process, self->peer, 16), kind == KIND_CALL);
    if (taken > 0 && kind == KIND_RESPONSE && !(call = Py_XNewRef(PyDict_GetItemWithError(self->given[PENDING], id))))
        taken = PyErr_Occurred() ? -1 : 0;
    if (taken > 0 && call && GET(uint64_t, frame + AT_EXTRA)) taken = note_pushed(self, call, frame);
    if (taken > 0 && judge(self, GET(uint16_t, frame + AT_CREDITS), releases, nreleases) < 0) taken = -1;
    if (taken > 0 && kind == KIND_CALL) taken = take_call(self, frame, id, &values, regions);
    else if (taken > 0) {
        int done = lease_values(self, &values, regions) < 0 ? -1
                   : call ? complete(self, id, call, PyList_GET_ITEM(values.list, 0), nreleases || values.nfound)
                          : take_push(self, taker, word, id, listed ? values.list : PyList_GET_ITEM(values.list, 0),
                                      GET(uint64_t, frame + AT_ID));
        if (done < 0) taken = -1;
    }
    drop_values(&values);
    Py_XDECREF(taker);
    Py_XDECREF(word);
    Py_XDECREF(call);
    Py_DECREF(id);
    return taken;
}
/* Process the whole frames in the first `total` bytes of `data`, in order. Plain results complete their calls, and
 * plain calls go to their host. All other frames go to frame(view, at, total), which returns the start of the
 * next frame. */
static int wire_take(Wire *self, PyObject *view, const unsigned char *data, Py_ssize_t total) {
    Py_ssize_t at = 0;
    while (at < total) {
        Py_ssize_t length = total - at >= 4 ? (Py_ssize_t)GET(uint32_t, data + at) : -1;
        int whole = length >= HEAD - 4 && length <= self->max_frame && length <= total - at - 4;
        int taken = whole ? take_in(self, data + at, length, 0) : 0;
        if (taken < 0) return -1;
        if (taken) {
            self->counters->frames_received++;
            at += length + 4;
            continue;
        }
        PyObject *next = PyObject_CallFunction(self->given[FRAME], "Onn", view, at, total);
        if (!next) return -1;
        Py_ssize_t to = PyLong_AsSsize_t(next);
        Py_DECREF(next);
        if (to == -1 && PyErr_Occurred()) return -1;
        if (to <= at || to > total) {
            PyErr_SetString(PyExc_ValueError, "the callback for a frame did not move on");
            return -1;
        }
        at = to;
    }
    return 0;
}
/* Process the FORWARD frames of a batch ahead of their turns, so that they are known when their calls start. 0, or
 * -1 with an exception. */
static int take_forwards(Wire *self, const unsigned char *data, Py_ssize_t total) {
    for (Py_ssize_t at = 0, length; total - at >= HEAD; at += length + 4) {
        length = (Py_ssize_t)GET(uint32_t, data + at);
        if (length < HEAD - 4 || length > total - at - 4) return 0;
        if (data[at + AT_KIND] == KIND_FORWARD && take_in(self, data + at, length, 1) < 0) return -1;
    }
    return 0;
}
/* A batch: answers to it on the loop's thread are sent together at its end. */
int wire_batch(Wire *self, PyObject *view, const unsigned char *data, Py_ssize_t total) {
    self->feeding = 1;
    wire_look(self);
    self->heard = wire_now();
    int failed = take_forwards(self, data, total) < 0 || wire_take(self, view, data, total) < 0;
    self->feeding = 0;
    if (PyDict_GET_SIZE(self->given[AHEAD])) PyDict_Clear(self->given[AHEAD]); /* their calls did not come */
    if (self->unflushed) {
        PyObject *type, *error, *traceback;
        PyErr_Fetch(&type, &error, &traceback);
        self->unflushed = 0;
        int flushed = wire_flush(self);
        if (type) {
            PyErr_Clear();
            PyErr_Restore(type, error, traceback);
        } else failed |= flushed;
    }
    if (failed) return -1;
    int waits = has_backlog(self);
    if (waits || self->credits->owed >= self->credits->threshold) {
        PyObject *done = waits < 0 ? NULL : PyObject_CallNoArgs(self->given[BATCH]);
        Py_XDECREF(done);
        if (!done) return -1;
    }
    return 0;
}
PyObject *wire_feed(Wire *self, PyObject *arg) {
    Py_buffer view;
    if (!wire_is_whole(self)) return NULL;
    if (PyObject_GetBuffer(arg, &view, PyBUF_SIMPLE) < 0) return NULL;
    int failed = wire_batch(self, arg, view.buf, view.len);
    PyBuffer_Release(&view);
    if (failed) return NULL;
    Py_RETURN_NONE;
}
