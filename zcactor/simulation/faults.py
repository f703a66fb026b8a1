"""The faults of a schedule, as they come about."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zcactor.simulation.network import Delay, reset

if TYPE_CHECKING:
    from collections.abc import Callable

    from zcactor.simulation.cluster import Cluster
    from zcactor.simulation.loop import SimLoop
    from zcactor.simulation.record import Record
    from zcactor.simulation.schedule import Fault

__all__ = ["Faults"]

REBOOT = 1.0, 6.0
"""Virtual seconds until what supervises a host starts its agent again."""


class Faults:
    """Lets faults happen, and repairs what they broke.

    Args:
        cluster: to which they happen.
        record: is told of what came of them.
    """

    def __init__(self, cluster: Cluster, record: Record) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._network = cluster.network
        self._record = record
        self._drawn = self._world.random("repairs")
        self._loop: SimLoop = self._world.process("nowhere", "faults")
        self._stopped: list[SimLoop] = []
        self._dark: dict[str, None] = {}
        self._over = False
        self.done: list[Fault] = []
        """Those that have happened."""

    def arm(self, faults: tuple[Fault, ...]) -> None:
        """Let each of them happen in its time from now."""
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

    def _agent(self, fault: Fault) -> None:
        agent = self._cluster.hosts[fault.who[0]].agent
        if agent is not None:
            self._record.saw("agent killed")
            self._cluster.kill(agent, "its process was killed by signal 9 (SIGKILL)")

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

    def _cut(self, fault: Fault) -> None:
        one, other = fault.who
        for way in ((one, other), (other, one)):
            self._network.cut(*way)
            self._later(fault.seconds, self._network.heal, *way)
        self._record.saw("cut")

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

    # ---------------------------------------------------------------- repairs

    def _supervise(self) -> None:
        """Start the agent of a host again that has ended."""
        for host in self._cluster.hosts.values():
            if host.agent is None and host.name not in self._dark and not host.starting:
                host.starting = True
                self._later(self._drawn.uniform(*REBOOT), self._start, host.name)
        self._later(1.0, self._supervise)

    def _start(self, name: str) -> None:
        host = self._cluster.hosts[name]
        host.starting = False
        if host.agent is None and name not in self._dark and not self._over:
            self._record.saw("node joined again")
            self._cluster.start_agent(name)

    def heal(self) -> None:
        """No further faults: every way is open, every host on, every process goes on."""
        self._over = True
        self._network.heal_all()
        self._network.slow.clear()
        self._network.refusing.clear()
        for loop in self._stopped:
            self._world.resume(loop)
        for host in list(self._dark):
            self._light(host)
        self._world.note(self._loop.label, "healed")
