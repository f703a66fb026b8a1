"""The numbers of the wire contract: a change breaks every peer, so each number is written down twice."""

from __future__ import annotations

from zcactor.rpc.messages import PROTOCOL_VERSION, UNCREDITED, Flags, Kind, Status

KINDS = {
    19: "HELLO CALL RESPONSE ITEM STREAM_CREDIT CANCEL RELEASE CREDIT GOODBYE REGIONS PUSH FORWARD DIAL",
}
"""The kinds of frames in the order of their numbers, by the protocol version from which on peers know them. A peer of
an earlier version ends the connection by which it gets one."""


def test_kinds() -> None:
    names = " ".join(KINDS.values()).split()
    assert {kind.name: kind.value for kind in Kind} == {name: value for value, name in enumerate(names)}
    assert list(KINDS) == sorted(KINDS) and max(KINDS) <= PROTOCOL_VERSION


def test_statuses() -> None:
    names = "OK ERROR CANCELLED STREAM_END NO_SUCH_ACTOR STOPPED KILLED MOVED"
    assert {status.name: status.value for status in Status} == {name: at for at, name in enumerate(names.split())}


def test_flags() -> None:
    assert {flag.name: flag.value for flag in Flags} == {"KWARGS": 1, "SPILLED": 2}


def test_two_kinds_take_no_credit() -> None:
    assert {Kind.CREDIT, Kind.GOODBYE} == UNCREDITED
