"""Peers by RDMA: frames by SEND, arrays by READ, and a TCP socket for the rest.

`endpoint` meets peers over TCP and makes a connection by RDMA where both processes can. Below it, from the top:

- `peer`: one peer. `connect` and `negotiation` make a `connection`. `bootstrap` has the messages on its socket, `link`.
`queue_pairs` makes the two queue pairs. `sending` writes frames to registered slots,
  `pulling` reads arrays in pieces, and `bulk` connects the queue pair for READs anew after a failure.
- `device`: the device, which all connections of a process share. `engine` polls for completions, `registration_cache`
  registers the arena, `slots` and `bounce` are registered memory, and `versions` has the seals by which a reader checks
  that bytes are still those of the object. `viability` proves by one READ that a device works.
- `driver`: verbs behind a small interface. `base` is its contract, `pyverbs_adapter` and `ibverbs_adapter` are the two
  Python bindings of libibverbs, and `bindings` chooses one of them. `fake` is a fabric in plain Python for tests
  without hardware, and `faults` are the failures that tests can plan in it.

No binding is imported until `driver.bindings.bindings` is called.
"""
