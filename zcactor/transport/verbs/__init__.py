"""Peers by RDMA: frames by SEND, arrays by READ, a TCP socket beside; and the verbs that this takes.

From the top, module for module:

- `endpoint`: meets peers over TCP, by `meeting`, and makes a connection by RDMA where both can: by `joining`, which
  proves the path, and which with what drives a device is imported only where there is one;
- `connection`: one peer: frames, pulls, and the end; with `link`, the socket, and `bulk`, the queue pair for READs,
  which is connected anew after a failure;
- `pair`: the two queue pairs of a connection; `bootstrap`: what the ends tell each other;
- `sending`: frames in registered slots, under credits; `slots`: the slots;
- `pulling`: arrays in pieces; `seals`: the check that they are still what was meant;
- `engine`: what all connections of a process share, and the loop's eye on completions; `extents`: the registered arena;
- `bounce`: registered memory for what comes to where none can be registered;
- `calibration`: from which size on an array is read rather than sent;
- `viability`: whether a device works, proven by one READ; `load`: which binding can be used here, and why not;
  `presence`: whether the kernel has a device.

Below that, verbs behind a small interface of our own:

- `base`: the shapes and the contract, which everything else uses or implements;
- `pyverbs_adapter`, `ibverbs_adapter`: the two Python bindings of libibverbs; `adapter`, `ledger`, `sysfs`: the checks,
  the order of closing, and the table of addresses, which both need;
- `fake`: a fabric in plain Python, for tests without hardware; `faults`: what it can be told to get wrong.

Nothing here imports a binding until `load.bindings` is called.
"""
