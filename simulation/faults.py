"""The faults of a schedule, as they happen."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Final

from simulation.failpoints import POINTS
from simulation.network import Delay, reset
from zcactor.control.forcing import force, waited_for
from zcactor.control.head import Head
from zcactor.errors import OutOfMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from simulation.cluster import Cluster
    from simulation.loop import SimLoop
    from simulation.record import Record
    from simulation.schedule import Fault
    from zcactor.objectstore.store import Block

__all__ = ["Faults"]

REBOOT: Final = (1.0, 6.0)
"""Virtual seconds until a host's supervisor starts its agent again."""
HEARD: Final = (0.1e-3, 2e-3)
"""Virtual seconds until an agent notices that its zygote is gone."""
FORCED: Final = 12.0
"""Virtual seconds between two looks of an operator at whether the head waits for nodes that have ended."""
FLAPS: Final = 8
"""The number of times that a flapping way closes and opens."""


class Faults:
    """The faults of a run, and the repair of the damage.

    Args:
        cluster: the cluster to which they happen.
        record: the record that gets their effects.
    """

    def __init__(self, cluster: Cluster, record: Record) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._network = cluster.network
        self._record = record
        self._drawn = self._world.random("repairs")
        self._loop: SimLoop = self._world.process("nowhere", "faults")
        self._stopped: list[SimLoop] = []
        self._taken: dict[SimLoop, list[Block]] = {}
        self._dark: dict[str, None] = {}
        self._points: dict[str, Fault] = {}
        self._over = False
        self.beheaded = False
        """Whether the head's host is gone, and the cluster with it."""
        self.done: list[Fault] = []
        """The faults that have happened."""

    def arm(self, faults: tuple[Fault, ...]) -> None:
        """Let each fault happen at its time from now."""
        for fault in faults:
            self._later(fault.at, self._happen, fault)
        self._later(1.0, self._supervise)

    def _later(self, seconds: float, function: Callable[..., None], *args: object) -> None:
        self._loop.at(self._world.now + seconds, function, *args)

    def _happen(self, fault: Fault) -> None:
        if self._over:
            return
        self._world.note(self._loop.label, "fault", fault=fault.kind, who=list(fault.who))
        self.done.append(fault)
        self._record.calm = False
        getattr(self, f"_{fault.kind}")(fault)

    def _victim(self, fault: Fault) -> SimLoop | None:
        living = [
            loop for loop in self._world.loops.values() if loop.host == fault.who[0] and loop.name.startswith("w")
        ]
        return living[fault.number % len(living)] if living else None

    # ---------------------------------------------------------------- kinds

    def _kill(self, fault: Fault) -> None:
        victim = self._victim(fault)
        if victim is not None:
            self._record.saw("worker killed")
            self._cluster.kill(victim, "its process was killed by signal 9 (SIGKILL)")

    def _exit(self, fault: Fault) -> None:
        victim = self._victim(fault)
        if victim is not None:
            self._record.saw("worker exited")
            self._cluster.kill(victim, "its process exited with status 3")

    def _zygote(self, fault: Fault) -> None:
        host = self._cluster.hosts[fault.who[0]]
        if host.agent is not None and host.node is not None:
            self._record.saw("zygote lost")
            for loop in [each for each in self._world.loops.values() if each.host == host.name]:
                if loop.name.startswith("w"):
                    self._cluster.kill(loop, "the node's zygote ended, and all workers with it")
            host.agent.at(self._world.now + self._drawn.uniform(*HEARD), host.node.zygote_lost)

    def _agent(self, fault: Fault) -> None:
        agent = self._cluster.hosts[fault.who[0]].agent
        if agent is not None:
            self._record.saw("agent killed")
            self._cluster.kill(agent, "its process was killed by signal 9 (SIGKILL)")

    def _head(self, fault: Fault) -> None:
        self.beheaded = True
        self._record.saw("the head's host is gone")
        self._cluster.switch_off(fault.who[0])

    def _failpoint(self, fault: Fault) -> None:
        """Kill the head where it reaches a point, from now on."""
        self._points.setdefault(POINTS[fault.number % len(POINTS)], fault)

    def armed(self) -> bool:
        """Whether the head is to be killed at a point."""
        return bool(self._points)

    def reached(self, point: str) -> bool:
        """Kill the head where `point` is armed; whether that was so."""
        fault = self._points.pop(point, None)
        if fault is None or self._over:
            return False
        self._record.saw(f"head killed {point}")
        self._restart(fault)
        return True

    def _restart(self, fault: Fault) -> None:
        host = self._cluster.hosts[fault.who[0]]
        if host.agent is None:  # an earlier fault of that kind
            return
        self._record.saw("head killed")
        self._cluster.kill(host.agent, "its process was killed by signal 9 (SIGKILL)")
        host.starting = True
        self._later(fault.seconds, self._start, host.name)

    def _silence(self, fault: Fault) -> None:
        if self._cluster.book is not None:
            self._record.saw("the head's log is silent")
            self._cluster.book.stop()
            self._later(fault.seconds, self._cluster.book.resume)

    def _light(self, host: str) -> None:
        if host not in self._dark:
            return
        del self._dark[host]
        self._record.saw("host back")
        self._cluster.switch_on(host)

    def _off(self, fault: Fault) -> None:
        host = fault.who[0]
        if host not in self._dark:
            self._dark[host] = None
            self._record.saw("host off")
            self._cluster.switch_off(host)
            self._later(fault.seconds, self._light, host)

    def _between(self, some: Iterable[str], others: Iterable[str], seconds: float) -> None:
        """Cut every way between two sets of hosts, for a while."""
        for one, other in itertools.product(some, others):
            for way in ((one, other), (other, one)):
                self._network.cut(*way)
                self._later(seconds, self._network.heal, *way)

    def _cut(self, fault: Fault) -> None:
        one, other = fault.who
        self._between((one,), (other,), fault.seconds)
        self._record.saw("cut")

    def _part(self, fault: Fault) -> None:
        self._between(fault.who, [host for host in self._cluster.hosts if host not in fault.who], fault.seconds)
        self._record.saw("some hosts cut off")

    def _flap(self, fault: Fault) -> None:
        one, other = fault.who
        for turn in range(FLAPS):
            self._later(turn * fault.seconds / FLAPS, self._blink, one, other, fault.seconds / FLAPS / 2)
        self._record.saw("a way flaps")

    def _blink(self, one: str, other: str, seconds: float) -> None:
        if not self._over:
            self._between((one,), (other,), seconds)

    def _swizzle(self, fault: Fault) -> None:
        """Cut off one host after another, and connect them again in another order (FoundationDB's test of that
        name)."""
        drawn = random.Random(fault.number)
        for host in fault.who:
            cut = drawn.uniform(0, fault.seconds / 2)
            self._later(cut, self._isolate, host, drawn.uniform(fault.seconds / 2, fault.seconds) - cut)
        self._record.saw("swizzled")

    def _isolate(self, host: str, seconds: float) -> None:
        if not self._over:
            self._between((host,), [other for other in self._cluster.hosts if other != host], seconds)

    def _oneway(self, fault: Fault) -> None:
        one, other = fault.who
        self._network.cut(one, other)
        self._later(fault.seconds, self._network.heal, one, other)
        self._record.saw("cut one way")

    def _stop(self, fault: Fault) -> None:
        victim = self._victim(fault)
        if victim is not None:
            self._record.saw("worker stopped")
            self._world.stop(victim)
            self._stopped.append(victim)
            self._later(fault.seconds, self._world.resume, victim)

    def _full(self, fault: Fault) -> None:
        """Take all of a store's room, so that every other allocation raises `OutOfMemory`."""
        victim = self._victim(fault)
        if victim is None or victim.process is None:
            return
        self._record.saw("no room in a store")
        store, taken = victim.process.store, self._taken.setdefault(victim, [])
        nbytes = store.stats().capacity
        while nbytes:
            try:
                taken.append(store.allocate(nbytes, 1))
            except OutOfMemory:
                nbytes //= 2
        self._later(fault.seconds, self._empty, victim)

    def _empty(self, victim: SimLoop) -> None:
        self._taken.pop(victim, None)

    def _jump(self, fault: Fault) -> None:
        victim = self._victim(fault)
        if victim is not None:
            self._record.saw("a clock jumps")
            self._world.leap(victim, fault.seconds)

    def _reset(self, fault: Fault) -> None:
        hosts = set(fault.who)
        for end in list(self._network.connections):
            if {end.loop.host, end.other.loop.host} == hosts and not end.lost:
                self._record.saw("connection reset")
                end.lose(reset())

    def _slow(self, fault: Fault) -> None:
        one, other = fault.who
        for way in ((one, other), (other, one)):
            self._network.slow[way] = Delay(0.001, 0.05, tail=0.05)
            self._later(fault.seconds, self._fast, way)

    def _fast(self, way: tuple[str, str]) -> None:
        self._network.slow.pop(way, None)

    def _refuse(self, fault: Fault) -> None:
        self._network.refusing[fault.who[0]] = None
        self._later(fault.seconds, self._admit, fault.who[0])

    def _admit(self, host: str) -> None:
        self._network.refusing.pop(host, None)

    def _handshake(self, fault: Fault) -> None:
        self._record.saw("handshakes lost")
        self._network.losing[fault.who[0]] = None
        self._later(fault.seconds, self._find, fault.who[0])

    def _find(self, host: str) -> None:
        self._network.losing.pop(host, None)

    # ---------------------------------------------------------------- repairs

    def _supervise(self) -> None:
        """Start the agent of a host again that has ended, as long as there is a head. Where a head comes back, nodes
        may end for want of it after all faults."""
        if self.beheaded:
            return
        for host in self._cluster.hosts.values():
            if host.agent is None and host.name not in self._dark and not host.starting:
                host.starting = True
                self._later(self._drawn.uniform(*REBOOT), self._start, host.name)
        self._later(1.0, self._supervise)

    def _start(self, name: str) -> None:
        host = self._cluster.hosts[name]
        host.starting = False
        over = self._over and self._cluster.book is None
        if host.agent is None and name not in self._dark and not over and not self.beheaded:
            self._record.saw("node joined again")
            self._cluster.start_agent(name)

    def _operate(self) -> None:
        """Look, as an operator does, whether the head waits for more than half of the nodes, which have ended, and have
        it act without them."""
        host = self._cluster.head_host
        head = None if host is None else host.node
        if host is not None and host.agent is not None and isinstance(head, Head) and waited_for(head.members):
            self._record.saw("a head was forced")
            host.agent.at(self._world.now, self._force, head)
        self._later(FORCED, self._operate)

    @staticmethod
    def _force(head: Head) -> None:
        head.process.tasks.begin(force(head.members))

    def heal(self) -> None:
        """End all faults: open every way, switch every host on, and let every process go on."""
        self._over = True
        self._network.heal_all()
        self._network.slow.clear()
        self._network.refusing.clear()
        self._network.losing.clear()
        for loop in self._stopped:
            self._world.resume(loop)
        self._taken.clear()
        for host in list(self._dark):
            self._light(host)
        book, first = self._cluster.book, self._cluster.head_host
        if book is not None and first is not None:
            book.resume()
            book.loss = 0.0
            if first.agent is None and not self.beheaded:
                self._cluster.start_agent(first.name)
            if self._cluster.elects:
                self._later(FORCED, self._operate)
        self._world.note(self._loop.label, "healed")
