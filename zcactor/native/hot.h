/* The hot path of a connection, in C: received and sent plain frames, credits, and the bytes that wait to be sent.
 *
 * Measured need: after a context switch the interpreter runs with cold caches, and each Python function in the path of
 * a call costs a multiple of its cost in a loop. This code is the path of a call with plain arguments. All other frames
 * take the Python path (zcactor.rpc.codec, zcactor.rpc.session), which makes the same bytes.
 *
 * Code that changes credits, releases and the tail of a send buffer together neither runs Python nor releases the
 * interpreter lock meanwhile, so that it is atomic towards the other threads of the process. Sends are non-blocking.
 *
 * The rule: after anything that can run Python, or release the interpreter lock, read every field again, and own
 * each object that is used across it. Python runs in a call or an attribute of any object that is not of an exact
 * built-in type, in the last Py_DECREF of one, in an allocation that the garbage collector tracks, and in the slots'
 * full() and flush(). seal_apply does both, too. Another thread may have written a frame, taken the
 * releases, or closed the connection meanwhile. */
#ifndef ZCACTOR_HOT_H
#define ZCACTOR_HOT_H
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "zcactor needs a little-endian machine: frames are little-endian, and are written and read in place"
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_2_0_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL zcactor_hot_array
#ifndef IMPORTS_NUMPY /* arrays.c imports it for all files */
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

/* NumPy takes longer to import than zcactor does, and a head or an agent without arrays does without it. So its table of
 * functions is there from the first array on: nothing of NumPy's is used where PyArray_API is NULL. */

int import_numpy(void);          /* have the table: 0, or -1 with an exception */
int is_array(PyObject *);        /* exactly an array; runs Python once: -1 with an exception */
#define WAS_ARRAY(object) (PyArray_API && PyArray_CheckExact(object)) /* where `is_array` has looked at it before */

/* ---- the frame template; see zcactor/rpc/codec.py */

#define CONSTANT_NBYTES 52
#define HEAD 100 /* bytes of a lean frame before its payload, length prefix included */
#define AT_ID 56
#define AT_EXTRA 64
#define AT_ACTOR 72
#define AT_CODE 76
#define AT_CREDITS 78
#define AT_KIND 80
#define AT_FLAGS 81
#define AT_NREGIONS 84
#define AT_REGIONS 88
#define AT_NPAYLOAD 96 /* without regions and releases */
#define AT_RELEASES_OFFSET 48
#define AT_PAYLOAD_OFFSET 52
#define SHARED_NBYTES 44 /* bytes of the constant that frames with regions or releases have, too */
#define REGION_NBYTES 56
#define RELEASE_NBYTES 16
#define MAX_VALUES 15 /* values in one plain frame: the most that the head of a short MessagePack array can count */
#define MAX_ARRAYS 8  /* of them by reference */
#define MAX_DIMS 8    /* of each */
#define MAX_CODE 31   /* bytes of a dtype's name, which is ASCII */
#define MAX_RELEASES 64
#define EXT_ARRAY 3 /* zcactor.marshal.values.Code.ARRAY */
#define EXT_INLINE_ARRAY 4
#define EXT_ARGUMENT 10
#define MAX_LABEL 200 /* bytes of a promise's label, which is ASCII */
#define REGION_REF 2  /* zcactor.objectstore.ref.RegionKind.REF */
#define KIND_CALL 1
#define KIND_RESPONSE 2
#define KIND_PUSH 10
#define KIND_FORWARD 11
#define MAX_FORWARDS 64
#define STATUS_OK 0

#define PUT(T, p, v)                     \
    do {                                 \
        T put_ = (T)(v);                 \
        memcpy((p), &put_, sizeof put_); \
    } while (0)
#define GET(T, p)                        \
    (__extension__({                     \
        T get_;                          \
        memcpy(&get_, (p), sizeof get_); \
        get_;                            \
    }))

/* ---- module.c */

typedef struct { /* state of one import of the module */
    char constant[CONSTANT_NBYTES];
    PyObject *protocol_error, *connection_lost, *state_queued, *state_sent; /* from Python, as is the constant */
    PyTypeObject *credits_type, *counters_type, *send_buffer_type, *wire_type, *reader_type, *cipher_type,
        *meeting_type, *seat_type, *admission_type, *lane_type;
    PyObject *lent; /* arrays that were writable before they were lent or claimed, by address; see arrays.c */
    /* Names of attributes and methods, interned, which live as long as the module. */
    PyObject *str_complete_plain, *str_grant, *str_withdraw, *str_release, *str_store, *str_sealed, *str_exported,
        *str_id, *str_offset, *str_address, *str_session, *str_state, *str_receive_plain, *str_receive_linked, *str_key,
        *str_label, *str_forwarded, *str_pushed, *str_full, *str_flush, *str_setflags, *str_closed, *str_flush_due,
        *str_call_soon, *str_append;
} State;
extern PyType_Spec credits_spec, counters_spec, send_buffer_spec, wire_spec, reader_spec, cipher_spec, meeting_spec,
    seat_spec, admission_spec, lane_spec;
/* The module of one of its types, and the state; NULL with an exception when the module is being collected. An object
 * that points to the state owns the module: the garbage collector may take a type from its module before the type's
 * objects. */
PyObject *module_of(PyTypeObject *type, State **state);

/* ---- credits.c */

typedef struct {
    PyObject_HEAD
    int window, available, owed, threshold;
} Credits;

int credits_refuse_returned(Credits *self, long count);
int credits_refuse_consumed(Credits *self);
static inline int credits_do_returned(Credits *self, long count) {
    if (count < 0 || count > self->window - self->available) return credits_refuse_returned(self, count);
    self->available += (int)count;
    return 0;
}
static inline int credits_do_consumed(Credits *self, long count) {
    if (count < 0 || count > self->window - self->owed) return credits_refuse_consumed(self);
    self->owed += (int)count;
    return 0;
}

/* ---- counters.c */

typedef struct {
    PyObject_HEAD
    unsigned long long calls, frames_sent, frames_received, bytes_eager, bytes_mapped, bytes_read, bytes_received,
        bytes_authenticated, bytes_lent, pushes, requests;
} Counters;

/* ---- records.c */

#define RECORD_HEAD 4
#define RECORD_TAG 16
#define RECORD_MOST (1 << 20)
#define RECEIVE_MOST (256 << 10)

typedef struct {           /* the records of one direction; the references are owned */
    PyObject *apply;       /* a Cipher, or the encrypt or decrypt of an AESGCM; NULL: nothing is sealed */
    PyObject *turn;        /* turn(): such a function for the next key, and the `until` of that one */
    uint64_t count, until; /* records so far; number of the first record under the next key */
} Direction;

int direction_init(Direction *self, PyObject *apply, PyObject *turn, uint64_t count, uint64_t until);
void direction_clear(Direction *self);
PyObject *seal_apply(const State *state, Direction *direction, PyObject *text, uint32_t nbytes);

/* ---- send_buffer.c */

typedef struct {
    PyObject_HEAD
    int fd, blocked, on_slots, closed;
    char declines; /* plain frames are left to Python */
    unsigned long long committed; /* frames so far */
    Py_ssize_t max_reserve, head, tail, room;
    char *data;
    Py_buffer slot; /* on slots: the buffer with `data`, exported while it is written to; obj NULL: none */
    PyObject *scratch, *refused; /* a bytearray that Python encodes into; the reason against further frames, or NULL */
    PyObject *slots; /* on slots and not closed: full() gives a new slot; flush() sends all, True: some bytes are left */
    Direction sealed;            /* on a socket: of its records, if they are sealed */
    PyObject *record;            /* the last one without its header, until it is sent */
    Py_ssize_t sent;             /* bytes of the record with its header */
    int sealing;                 /* a thread is sending, and also sends bytes that others write meanwhile */
    int ended;                   /* the peer had hung up before the whole frames that are here could be sent: they stay */
    PyObject *module;
    State *state; /* of the module */
} SendBuffer;

char *buffer_room(SendBuffer *self, Py_ssize_t n);
int buffer_send(SendBuffer *self);
/* 1 when there is nothing to send, or when sending continues by itself. The owner of slots may have full ones. */
static inline int buffer_idle(SendBuffer *self) {
    return self->blocked || self->ended || (self->head == self->tail && !self->record && !self->slots);
}

/* ---- msgpack_plain.c */

Py_ssize_t plain_size(PyObject *value);
char *put_sized(char *p, const char *from, Py_ssize_t n, int h8, int h16, int h32);
char *put_plain(char *p, PyObject *value);
PyObject *get_plain(const unsigned char **at, const unsigned char *end);
static inline char *put_big(char *p, unsigned char head, uint64_t v, int nbytes) {
    *p++ = (char)head;
    for (int shift = 8 * (nbytes - 1); shift >= 0; shift -= 8) *p++ = (char)(v >> shift);
    return p;
}
static inline uint64_t get_big(const unsigned char *p, int nbytes) {
    uint64_t v = 0;
    while (nbytes--) v = v << 8 | *p++;
    return v;
}

/* ---- wire.c */

/* The objects that Python passes to a Wire, in the order of their names in wire.c; see zcactor.rpc.session. */
enum {
    CALL,
    FRAME,
    BATCH,
    STOPPED,
    PUSH,
    ARGUMENT,
    FORWARD,
    LEASE,
    SHARE,
    SCHEDULE_FLUSH,
    NCALLBACKS,
    LEASES = NCALLBACKS,
    PENDING,
    OPEN,
    BACKLOG,
    HOSTS,
    SESSION,
    LOOP,
    TAKERS,
    AHEAD,
    ANNOUNCED_TYPE,
    REF_TYPE,
    BLOCK_TYPE,
    STORE,
    CODES,
    DTYPES,
    NGIVEN
};

typedef struct {
    PyObject_HEAD
    SendBuffer *out;
    Credits *credits;
    Counters *counters;
    char process[16], peer[16];
    Py_ssize_t eager_limit, max_frame;
    uint64_t arena_nbytes, next_id;
    PyObject *given[NGIVEN];
    uint64_t *released; /* leases to give back with the next frame */
    Py_ssize_t nreleased, released_room;
    unsigned long thread;   /* the loop's */
    int feeding, unflushed; /* a batch is being processed; answers to it that were not sent yet */
    long long heard;  /* ms of the monotonic clock at which the last batch came, or the loop had looked for one */
    int behind_after; /* ms after `heard` from which Python has to send calls; 0: never */
    char flush_scheduled;
    unsigned char patience; /* calls that are flushed with what follows them, as results of such were passed on */
    PyObject *module;
    State *state; /* of the module */
} Wire;

typedef struct { /* a block that an array was shared as, owned, and the bytes of the array then; block NULL: none */
    PyObject *block;
    const char *data;
    Py_ssize_t nbytes;
} Shared;

int wire_is_whole(const Wire *self);
long long wire_now(void);
void wire_look(Wire *self);
int wire_flush(Wire *self);
int wire_schedule_flush(Wire *self);
PyObject *wire_respond_with(Wire *self, PyObject *id, PyObject *const *value, int more, uint64_t pushed, int entered,
                            Shared *shared);
/* Answers to one batch that share a system call. With more of them the caller would be idle meanwhile. */
#define ANSWERS_PER_FLUSH 64

/* ---- frame_write.c */

typedef struct {    /* an array among the values, as it was when it was checked; the references are owned */
    PyObject *code; /* of its dtype */
    PyArray_Descr *descr;
    const char *data;
    Py_ssize_t nbytes;
    PyObject *block; /* the block that it refers to; NULL: its bytes are in the frame */
    uint64_t id, offset;
    int promise; /* no array: `code` is the label, `id` and `offset` are the promise's and its key */
} Laid;

enum { PYTHON = 0, WRITTEN = 1, GONE = 2 }; /* the result of writing a frame; -1: an exception */

typedef struct {            /* a plain frame that is being made */
    int kind, flags, array; /* KIND_...; whether the payload is the array of the values, or the only one */
    uint32_t actor;
    uint64_t code, id, extra;
    PyObject *const *values;
    Py_ssize_t count;
    PyObject *table, *key; /* the entry that must still be there when the frame is written; table NULL: none */
    PyObject *call;        /* KIND_CALL: that entry, whose state it becomes; KIND_RESPONSE: the entry goes with it */
    int whole;             /* arrays of all sizes are in the frame, and are not shared */
    Shared *shared;        /* of the last array that was shared; NULL: nobody wants to know */
    Laid laid[MAX_VALUES]; /* of `values`; only those of arrays are filled in */
    int filled[MAX_VALUES], nfilled, nreferences, ngranted, npromises;
    Py_ssize_t most;    /* bytes of payload */
    Py_ssize_t payload; /* the same, once it is written */
} Frame;

int get_u64(PyObject *object, PyObject *name, uint64_t *value);
int is_attr(PyObject *object, PyObject *name, PyObject *wanted);
int has_backlog(Wire *self);
int write_frame(Wire *self, Frame *frame);
PyObject *wire_frame(Wire *self, PyObject *const *args, Py_ssize_t nargs);

/* ---- pushing.c */

PyObject *wire_push(Wire *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *wire_pass_on(Wire *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *wire_publish(Wire *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *wire_forward(Wire *self, PyObject *const *args, Py_ssize_t nargs);

/* ---- fold.c */

#define FOLD_DOC                                                                                             \
    "fold(kind, inputs, out, count, divisor): sum arrays of `count` elements, in the order of `inputs`, into\n" \
    "`out`, which overlaps none; a divisor above 0: their mean. Each is an address, bytes, or an array."
PyObject *hot_fold(PyObject *module, PyObject *args);
#define FOLDED_DOC \
    "folded(kind, inputs, like, divisor): as fold, into a new array of the dtype and shape of `like`, read-only"
PyObject *hot_folded(PyObject *module, PyObject *args);

/* ---- copying.c */

#define COPY_DOC                                                                                               \
    "copy(to, source, nbytes): copy between two addresses whose bytes do not overlap, past the processor's caches.\n" \
    "Other threads run meanwhile."
PyObject *hot_copy(PyObject *module, PyObject *args);

/* ---- receiving.c */

#define RECEIVE_DOC                                                                                               \
    "receive(fd, into, looking): fill a writable buffer from a blocking socket, looking so many us for bytes before\n" \
    "each sleep; the bytes received, fewer where the stream has ended. Other threads run meanwhile."
PyObject *hot_receive(PyObject *module, PyObject *args);

/* ---- arrays.c */

PyObject *hot_with_numpy(PyObject *module, PyObject *ignored);
PyObject *hot_address(PyObject *module, PyObject *array);
PyObject *hot_sole(PyObject *module, PyObject *array);
PyObject *hot_references(PyObject *module, PyObject *object);
PyObject *hot_open(PyObject *module, PyObject *array);
PyObject *hot_digest(PyObject *module, PyObject *args);
PyObject *hot_array_over(PyObject *module, PyObject *args);
PyObject *hot_lend(PyObject *module, PyObject *array);
PyObject *hot_give_back(PyObject *module, PyObject *array);
PyObject *hot_claim(PyObject *module, PyObject *array);
PyObject *hot_claimed(PyObject *module, PyObject *array);
PyObject *hot_lent(PyObject *module, PyObject *array);
PyObject *hot_keep(PyObject *module, PyObject *array);
int is_claimed(State *state, PyObject *array);

/* ---- seat.c */

typedef struct {
    PyObject_HEAD
    PyObject *meetings, *early, *pieces, *pushed, *touch; /* NULL: collected, touch: none */
    Py_ssize_t rank, size;
    long long next;
    char open;
    PyObject *module;
    State *state; /* of the module */
} Seat;

int seat_take(Seat *self, uint64_t key, PyObject *values);

/* ---- frame_read.c */

int wire_batch(Wire *self, PyObject *view, const unsigned char *data, Py_ssize_t total);
PyObject *wire_feed(Wire *self, PyObject *arg);

#endif
