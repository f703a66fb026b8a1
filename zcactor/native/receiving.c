/* Receiving many bytes from a socket straight to their place.
 *
 * A thread that sleeps in recv(2) is woken for each packet when it is faster than the sender, and the sender pays for
 * that: the processor of a sleeping receiver has halted, and takes an interrupt (30 us a time in a virtual machine). So
 * the thread looks again for a while before it sleeps, and lets others have the processor meanwhile. That shortens what
 * comes fast, and is no use for what comes slowly: after too many looks in vain it only sleeps. */
#include "hot.h"
#include <sched.h>
#include <time.h>

#define VAIN_MOST 2 /* times that it looks in vain; as many again for each MiB that has come */

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}
/* Fill `to`, and look for `looking` ns before each sleep. Returns the bytes received, fewer than `nbytes` where the
 * stream has ended; -1 with errno. */
static Py_ssize_t receive_whole(int fd, char *to, Py_ssize_t nbytes, int64_t looking) {
    Py_ssize_t at = 0, vain = 0;
    int64_t since = 0; /* the last bytes came; 0: just now */
    while (at < nbytes) {
        const int looks = vain < VAIN_MOST * (1 + (at >> 20));
        ssize_t received = recv(fd, to + at, (size_t)(nbytes - at), looks ? MSG_DONTWAIT : MSG_WAITALL);
        if (received < 0 && looks && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            const int64_t now = now_ns();
            if (!since) since = now;
            if (now - since < looking) {
                sched_yield();
                continue;
            }
            vain++;
            since = 0;
            received = recv(fd, to + at, (size_t)(nbytes - at), 0);
        }
        if (received < 0 && errno == EINTR) continue;
        if (received < 0) return -1;
        if (received == 0) break;
        at += received;
        since = 0;
    }
    return at;
}

/* receive(fd, into, looking): see RECEIVE_DOC. */
PyObject *hot_receive(PyObject *Py_UNUSED(module), PyObject *args) {
    int fd;
    unsigned int looking; /* us */
    Py_buffer into;
    if (!PyArg_ParseTuple(args, "iw*I:receive", &fd, &into, &looking)) return NULL;
    Py_ssize_t received;
    Py_BEGIN_ALLOW_THREADS
    received = receive_whole(fd, into.buf, into.len, (int64_t)looking * 1000);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&into);
    return received < 0 ? PyErr_SetFromErrno(PyExc_OSError) : PyLong_FromSsize_t(received);
}
