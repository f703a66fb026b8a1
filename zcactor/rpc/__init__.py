"""Remote calls: frames, their codec, credits and the state tables.

::

    messages   what a frame may say: kinds, statuses, flags
    codec      frames <-> bytes by a template (hot path)
    generic    the same by generated FlatBuffers code, behind verify
    verify     bounds checks that make the generated accessors safe on a peer's bytes
    credits    flow control: a frame never meets a full receive queue
    protocol   legal states and transitions of calls, streams and objects

None of these does I/O, reads a clock or knows an event loop.
"""
