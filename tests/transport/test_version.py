"""The version of the protocol is written in one place."""

from __future__ import annotations

import zcactor.rpc.messages
from zcactor.transport import version
from zcactor.transport.stream import handshake


def test_greetings_of_both_layers_say_the_same() -> None:
    assert 0 < version.PROTOCOL_VERSION < 1 << 16
    for module in (zcactor.rpc.messages, handshake):
        assert vars(module)["PROTOCOL_VERSION"] is version.PROTOCOL_VERSION
