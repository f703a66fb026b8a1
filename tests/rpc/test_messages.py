"""The numbers of the wire contract: a change breaks every peer, so each number is written down twice."""

from __future__ import annotations

from zcactor.rpc.messages import UNCREDITED, Flags, Kind, Status


def test_kinds() -> None:
    names = "HELLO CALL RESPONSE ITEM STREAM_CREDIT CANCEL RELEASE CREDIT GOODBYE REGIONS PUSH FORWARD DIAL"
    assert {kind.name: kind.value for kind in Kind} == {name: value for value, name in enumerate(names.split())}


def test_statuses() -> None:
    names = "OK ERROR CANCELLED STREAM_END NO_SUCH_ACTOR STOPPED KILLED MOVED"
    assert {status.name: status.value for status in Status} == {name: at for at, name in enumerate(names.split())}


def test_flags() -> None:
    assert {flag.name: flag.value for flag in Flags} == {"KWARGS": 1, "SPILLED": 2}


def test_two_kinds_take_no_credit() -> None:
    assert {Kind.CREDIT, Kind.GOODBYE} == UNCREDITED
