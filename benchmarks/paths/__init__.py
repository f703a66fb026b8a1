"""Three ways of arrays from one process to another, which `benchmarks.thesis` compares.

- *encode*: arrays are pickled in-band by protocol 4, and the bytes go over a stream.
- *private buffers*: arrays are copied into a ring of slots of 1 MiB, and out of one at the other end.
- *zero copy*: zcactor.

The first two do without zcactor. No part of the package uses them.
"""
