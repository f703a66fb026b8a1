"""The driver: a program's side of the runtime, from `zcactor.init` to `zcactor.shutdown`."""
