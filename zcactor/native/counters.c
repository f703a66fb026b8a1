/* Counters: zcactor.rpc.counters.Counters, with the counts of the native part. */
#include "hot.h"

#define COUNTER(name) {#name, T_ULONGLONG, offsetof(Counters, name), 0, NULL}
static PyMemberDef counters_members[] = {
    COUNTER(calls),          COUNTER(frames_sent),         COUNTER(frames_received),
    COUNTER(bytes_eager),    COUNTER(bytes_mapped),        COUNTER(bytes_read),
    COUNTER(bytes_received), COUNTER(bytes_authenticated), COUNTER(pushes), {NULL, 0, 0, 0, NULL}};
static PyType_Slot counters_slots[] = {
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_members, counters_members},
    {Py_tp_doc, (char *)"zcactor.rpc.counters.Counters, where the native part counts too."},
    {0, NULL}};
PyType_Spec counters_spec = {.name = "zcactor.native._hot.Counters",
                             .basicsize = sizeof(Counters),
                             .slots = counters_slots,
                             .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE};
