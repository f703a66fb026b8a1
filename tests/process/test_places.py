"""The addresses of processes, as handles report them."""

from __future__ import annotations

from typing import Any

import pytest

from zcactor.assembly.endpoints import find_through
from zcactor.errors import ConnectionLost, ProtocolError
from zcactor.process.cluster import MembershipService
from zcactor.process.head_places import HeadPlaces
from zcactor.process.places import MOST, Places, place_of

OURS, OTHER, THIRD = (letter * 16 for letter in (b"o", b"t", b"3"))


def places(address: str = "ours@10.0.0.1:7") -> Places:
    return Places(OURS, lambda: address)


def test_what_is_passed_on() -> None:
    table = places()
    assert table.of(OURS) == "10.0.0.1:7"
    assert table.of(OTHER) == ""
    table.claim(OTHER, "[fd00::2]:8")
    table.claim(OTHER, "10.0.0.9:9")
    table.claim(OURS, "10.0.0.9:9")
    table.claim(THIRD, "")
    assert [table.of(process) for process in (OURS, OTHER, THIRD)] == ["10.0.0.1:7", "[fd00::2]:8", ""]
    assert places("").of(OURS) == ""
    assert place_of("name@[fd00::2]:8") == "[fd00::2]:8"


def test_a_claim_is_forgotten_where_nobody_was_reached_by_it() -> None:
    table = places()
    table.claim(OTHER, "10.0.0.2:8")
    assert not table.refuted(OTHER), "it was not used"
    assert table.try_(OTHER) == f"{OTHER.hex()}@10.0.0.2:8"
    table.reached(OTHER)
    assert not table.refuted(OTHER)
    assert table.try_(OTHER) == f"{OTHER.hex()}@10.0.0.2:8", "and again, when the connection was closed"
    assert table.refuted(OTHER)
    assert not table.refuted(OTHER)
    assert table.try_(OTHER) == ""
    assert table.try_(THIRD) == ""


@pytest.mark.parametrize("place", ["x" * (MOST + 1), 7, None, b"10.0.0.1:7"])
def test_what_is_no_place(place: Any) -> None:
    table = places()
    with pytest.raises(ProtocolError, match=f"no text of at most {MOST} bytes"):
        table.claim(OTHER, place)
    assert table.of(OTHER) == ""


def test_few_are_remembered() -> None:
    table = places()
    for number in range(5_000):
        table.claim(number.to_bytes(16, "big"), "10.0.0.2:8")
    assert len(table._claimed) == 4_096
    assert table.of((0).to_bytes(16, "big")) == ""
    assert table.of((4_999).to_bytes(16, "big")) == "10.0.0.2:8"


class Head:
    """A head that records its questions."""

    process = b"h" * 16

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.places = HeadPlaces()

    def look_at(self, place: str) -> None:
        self.places = HeadPlaces(place)

    async def ask(self, method: Any, process: bytes) -> str:
        assert method is MembershipService.find
        self.asked.append(process)
        if process == THIRD:
            raise ConnectionLost("it has ended")
        return f"{process.hex()}@10.0.0.3:9"


class Finding:
    """An endpoint that gets a function to find others."""

    find: Any

    def find_by(self, find: Any) -> None:
        self.find = find


async def test_the_head_is_asked_where_no_handle_has_said_it() -> None:
    endpoint, head, table = Finding(), Head(), places()
    made: Any = endpoint, table, head, "h@10.0.0.0:1"
    find_through(*made)
    table.claim(OTHER, "10.0.0.2:8")
    assert await endpoint.find(OTHER.hex()) == f"{OTHER.hex()}@10.0.0.2:8"
    assert await endpoint.find(Head.process.hex()) == "h@10.0.0.0:1"
    assert head.asked == []
    assert table.refuted(OTHER)
    assert await endpoint.find(OTHER.hex()) == f"{OTHER.hex()}@10.0.0.3:9"
    with pytest.raises(ConnectionLost):
        await endpoint.find(THIRD.hex())
    assert head.asked == [OTHER, THIRD]
