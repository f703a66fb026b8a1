"""Remote calls: frames, their codec, and the sessions that send and receive frames.

::

    messages   the vocabulary of frames: kinds, statuses, flags
    codec      frames <-> bytes by a template (hot path)
    generic    frames <-> bytes by generated FlatBuffers code, behind verify
    verify     bounds checks that make the generated accessors safe on a peer's bytes

None of these four does I/O, reads a clock or knows an event loop. ``session`` is the shell around them.
"""
