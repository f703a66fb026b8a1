"""The start of a node in the place of one that has left, by `zcactor.cluster.daemon.start_node` with its options."""

from __future__ import annotations

import sys

import msgspec

from zcactor.cluster.daemon import start_node
from zcactor.config import Config

__all__ = ["main"]


def main() -> None:
    """Start the node whose options are on standard input (`zcactor.cluster.daemon.options_again`), and return when it
    is ready.

    Raises:
        Exception: as `zcactor.cluster.daemon.start_node`; the traceback goes to the log of the node that has left.
    """
    options = msgspec.msgpack.decode(sys.stdin.buffer.read())
    config = Config(**options.pop("config"))
    start_node(config, own_host=True, stays=True, **options)
