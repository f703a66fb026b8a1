"""RDMA verbs behind a small interface of our own: devices, memory regions, queue pairs and completions.

Module for module:

- `base`: the shapes and the contract, which everything else here implements or uses;
- `pyverbs_adapter`, `ibverbs_adapter`: the two Python bindings of libibverbs;
- `load`: which of the two can be used here, and why not;
- `viability`: whether a device works, proven by one RDMA READ;
- `fake`: a fabric in plain Python, for tests without hardware;
- `ledger`, `sysfs`: the order of closing, and the table of addresses, which both adapters need.

Nothing here imports a binding until `load.bindings` is called.
"""
