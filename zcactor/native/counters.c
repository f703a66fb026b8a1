/* Counters of one process for messages and bytes, cumulative since it started. Each is written under a session's lock or
 * on the loop's thread; a reader may see a count that is one frame old. */
#include "hot.h"

#define COUNTER(name, text) {#name, T_ULONGLONG, offsetof(Counters, name), 0, text}
static PyMemberDef counters_members[] = {
    COUNTER(calls, "Calls sent."),
    COUNTER(frames_sent, NULL),
    COUNTER(frames_received, NULL),
    COUNTER(bytes_eager, "Payload bytes sent in frames."),
    COUNTER(bytes_mapped,
            "Bytes of arrays, and of payloads above the eager limit, received by mapping the owner's memory. Bytes that a "
            "message names twice count once."),
    COUNTER(bytes_read, "Bytes pulled by RDMA READ."),
    COUNTER(bytes_received, "Bytes of arrays received over TCP."),
    COUNTER(bytes_authenticated, "Bytes received over TCP that came with valid tags."),
    COUNTER(bytes_lent, "Bytes of arrays, and of payloads above the eager limit, sent by reference."),
    COUNTER(pushes, "PUSH frames sent with a result."),
    COUNTER(requests, "Calls sent that are for the process and no actor of it, also part of `calls`."),
    {NULL, 0, 0, 0, NULL}};
static PyType_Slot counters_slots[] = {
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_members, counters_members},
    {Py_tp_doc, (char *)"Counts of messages and bytes of one process: plain integers."},
    {0, NULL}};
PyType_Spec counters_spec = {.name = "zcactor.native._hot.Counters",
                             .basicsize = sizeof(Counters),
                             .slots = counters_slots,
                             .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE};
