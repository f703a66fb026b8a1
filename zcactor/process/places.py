"""The addresses at which processes listen, as received handles state them.

They spare a process the question to the cluster's head for each process that it connects to. An address in a handle is
a claim of the handle's sender: another process may listen there by now. The handshake proves the listener's identity,
and where it fails the head is asked after all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from zcactor.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MOST", "Places", "place_of"]

MOST: Final = 64
"""Bytes of a place, at most: an address of version 6 and a port take 47."""
_REMEMBERED: Final = 4_096


class Places:
    """The table of places. Any thread may use it.

    Args:
        process: id of this process, 16 bytes.
        address: function that returns the address of this process, ``name@host:port``; empty where peers on other hosts
            cannot reach it.
    """

    def __init__(self, process: bytes, address: Callable[[], str]) -> None:
        self._process = process
        self._address = address
        self._claimed: dict[bytes, str] = {}
        self._tried: dict[bytes, None] = {}
        """Claims in use for connections that are not open yet."""

    def of(self, process: bytes) -> str:
        """The place of `process`, ``host:port``; empty where it is unknown."""
        if process == self._process:
            return place_of(self._address())
        return self._claimed.get(process, "")

    def claim(self, process: bytes, place: str) -> None:
        """Note a handle's claim that `process` listens at `place`. An earlier claim stays.

        Raises:
            ProtocolError: `place` is not a str, or is longer than `MOST`.
        """
        if type(place) is not str or len(place) > MOST:
            raise ProtocolError(f"a handle says that its actor is at {place!r:.80}: no text of at most {MOST} bytes")
        if place and process != self._process and process not in self._claimed:
            self._claimed[process] = place
            if len(self._claimed) > _REMEMBERED:
                del self._claimed[next(iter(self._claimed))]

    def try_(self, process: bytes) -> str:
        """The address to try for `process`, ``name@host:port``; empty without a claim."""
        place = self._claimed.get(process)
        if place is None:
            return ""
        self._tried[process] = None
        return f"{process.hex()}@{place}"

    def reached(self, process: bytes) -> None:
        """Note that a connection to `process` is open."""
        self._tried.pop(process, None)

    def refuted(self, process: bytes) -> bool:
        """Forget the claim that was used for a failed connection to `process`. Returns whether a claim was used."""
        if process not in self._tried:
            return False
        del self._tried[process]
        self._claimed.pop(process, None)
        return True


def place_of(address: str) -> str:
    """The part ``host:port`` of an address ``name@host:port``."""
    return address.rpartition("@")[2]
