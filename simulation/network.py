"""The network between simulated hosts: its delays, and its cut ways.

It keeps the guarantees of TCP. A batch arrives once, whole and in order, or the connection ends. A cut way loses
nothing at once: systems send again, and waiting batches arrive after the way is open again. A host that hears nothing
for `SILENCE` gives the connection up, at either end and for a cut in either direction, as confirmations have to come
back. Processes of one host always reach each other.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from zcactor.errors import ConnectionLost

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from simulation.loop import SimLoop
    from simulation.world import World

__all__ = ["LOCAL", "SILENCE", "Delay", "Network"]

SILENCE: Final = (4.5, 5.5)
"""Virtual seconds without a sign of life until a system gives a connection up; see `zcactor.transport.tcp.liveness`."""
LOCAL: Final = (5e-6, 25e-6)
"""Virtual seconds on the way between two processes of one host."""
_NEAREST, _LONGER = LOCAL[0], LOCAL[1] - LOCAL[0]
AGAIN: Final = (0.0, 1.0)
"""Virtual seconds from the end of a cut until waiting batches are sent again."""


QUESTION: Final = (0.0, 2.5)
"""Virtual seconds until a system asks a silent peer's system for a sign of life."""

_Key = TypeVar("_Key", str, tuple[str, str])


class Delay:
    """The distribution of delays on the ways of a network.

    Args:
        low, high: virtual seconds between which a delay lies.
        tail: the probability of a delay that is up to 30 times as long.
    """

    def __init__(self, low: float = 50e-6, high: float = 200e-6, tail: float = 0.0) -> None:
        self.low = low
        self.high = high
        self.tail = tail

    def draw(self, rng: random.Random) -> float:
        """Draw the next delay."""
        delay = self.low + (self.high - self.low) * rng.random()
        if self.tail and rng.random() < self.tail:
            delay *= 10 ** rng.uniform(0, 1.5)
        return delay


class End(Protocol):
    """One end of a connection; see `simulation.connection.SimConnection`."""

    loop: SimLoop
    held: list[bytes | ConnectionLost]
    not_before: float

    @property
    def other(self) -> End:
        """The other end."""

    @property
    def lost(self) -> bool:
        """Whether this end is closed."""

    def lose(self, cause: ConnectionLost) -> None:
        """Take the system's report that the connection is broken."""

    def carry(self, item: bytes | ConnectionLost) -> None:
        """Send a batch, or the end of the stream, to the other end."""


class Network:
    """The ways between the hosts of one world.

    Args:
        world: the world of the hosts.
        delay: the delay of every way without one of its own.
    """

    def __init__(self, world: World, delay: Delay | None = None) -> None:
        self.world = world
        self.delay = delay or Delay()
        self.slow: dict[tuple[str, str], Delay] = {}
        """Ways with a delay of their own, by the hosts from and to which they lead."""
        self.refusing: dict[str, None] = {}
        """Hosts that take no new connections from others."""
        self.losing: dict[str, None] = {}
        """Hosts with which no handshake is completed."""
        self.listening: dict[str, Any] = {}
        """The `simulation.endpoint.SimEndpoint` of each process, by its hexadecimal process id."""
        self.connections: dict[End, None] = {}
        """Both ends of every open connection."""
        self.on_lost: Callable[[SimLoop, Exception | None], None] = lambda *_: None
        """Called at the end of each connection, for each end that noticed it."""
        self.on_overrun: Callable[[SimLoop, int, int], None] = lambda *_: None
        """Called for a process that has more frames outstanding than its window, with both numbers."""
        self.on_delivered: Callable[[SimLoop, Any, int], None] = lambda *_: None
        """Called after each batch with the process and the receiver that got it, and with the frames that the receiver
        has sent and the peer has not reported consumed."""
        self.frames = 0
        self.batches = 0
        self.nbytes = 0
        self._cut: dict[tuple[str, str], int] = {}
        self._off: dict[str, int] = {}
        self._cuts = 0
        self._links: dict[tuple[str, str], random.Random] = {}
        self.undrawn = world.random("no faults")
        """The generator of all connections, which draw no faults: these are the network's."""

    # ---------------------------------------------------------------- ways

    def rng(self, here: str, there: str) -> random.Random:
        """The generator of one way."""
        found = self._links.get((here, there))
        if found is None:
            found = self._links[here, there] = self.world.random(f"link/{here}/{there}")
        return found

    def time(self, here: SimLoop, there: SimLoop) -> float:
        """The delay of the next batch from one process to another."""
        way = here.host, there.host
        rng = self._links.get(way) or self.rng(*way)
        if way[0] == way[1]:
            return _NEAREST + _LONGER * rng.random()
        return (self.slow.get(way, self.delay) if self.slow else self.delay).draw(rng)

    def is_cut(self, here: str, there: str) -> bool:
        """Whether no batch comes through from one host to the other."""
        if not self._cut and not self._off:  # nearly always
            return False
        return here != there and ((here, there) in self._cut or here in self._off or there in self._off)

    def is_silent(self, here: str, there: str) -> bool:
        """Whether two hosts get no confirmations from each other: one cut direction is enough for that."""
        return self.is_cut(here, there) or self.is_cut(there, here)

    def is_late(self, here: str, there: str) -> bool:
        """Whether a batch between two hosts has not arrived: it is on its way, or waits where a way is or was cut."""
        return self.is_silent(here, there) or any(
            {end.loop.host, end.other.loop.host} == {here, there} and (end.held or end.not_before > self.world.now)
            for end in self.connections
        )

    def is_off(self, host: str) -> bool:
        """Whether the host is switched off."""
        return host in self._off

    def cut(self, here: str, there: str) -> None:
        """Cut the way from one host to another. Batches on their way arrive."""
        if here != there and (here, there) not in self._cut:
            self._cuts += 1
            self._cut[here, there] = self._cuts
            for end in list(self.connections):
                if {end.loop.host, end.other.loop.host} == {here, there}:
                    self._watch(end, self._cut, (here, there))

    def heal(self, here: str, there: str) -> None:
        """Open a way again."""
        if self._cut.pop((here, there), None) is not None:
            self._send_again()

    def heal_all(self) -> None:
        """Open every way again."""
        self._cut.clear()
        self._send_again()

    def switch_off(self, host: str) -> None:
        """Switch a host off without a word: no batch comes from it, and none gets there. Its processes are dead."""
        self._cuts += 1
        self._off[host] = self._cuts
        for end in list(self.connections):
            if end.other.loop.host == host != end.loop.host:
                self._watch(end, self._off, host)

    def switch_on(self, host: str) -> None:
        """Switch a host on. Its system does not know the connections from before, and says so when it is asked."""
        self._off.pop(host, None)
        for end in list(self.connections):
            if end.other.loop.host == host != end.loop.host and end.other.loop.dead:
                wait = self.rng(host, end.loop.host).uniform(*QUESTION)
                end.loop.at(self.world.now + wait, end.lose, reset())
        self._send_again()

    def _watch(self, end: End, what: dict[_Key, int], key: _Key) -> None:
        """Have the system at one end give up, unless batches come through again before its patience is over."""
        begun = what[key]

        def look() -> None:
            if what.get(key) == begun:
                end.lose(timed_out())

        end.loop.at(self.world.now + self.rng(end.loop.host, end.other.loop.host).uniform(*SILENCE), look)

    def _send_again(self) -> None:
        """Send the waiting batches on ways that are open."""
        for end in list(self.connections):
            here, there = end.loop.host, end.other.loop.host
            if end.held and not self.is_cut(here, there):
                end.not_before = max(end.not_before, self.world.now + self.rng(here, there).uniform(*AGAIN))
                held, end.held = end.held, []
                for item in held:
                    end.carry(item)


def timed_out() -> ConnectionLost:
    """The error that a system reports for a silent peer."""
    error = ConnectionLost("the connection broke: its host has not answered", maybe_executed=True)
    error.__cause__ = TimeoutError(errno.ETIMEDOUT, "Connection timed out")
    return error


def reset() -> ConnectionLost:
    """The error that a system reports when the peer's system does not know the connection."""
    error = ConnectionLost("the connection broke: Connection reset by peer", maybe_executed=True)
    error.__cause__ = ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
    return error
