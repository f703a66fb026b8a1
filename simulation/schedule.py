"""The draws before a run begins: its faults, its settings, and its workloads."""

from __future__ import annotations

import json
import random
import tomllib
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from zcactor.config import Config

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["KINDS", "TAKE_OVER", "VERSION", "WIRES", "BadSchedule", "Fault", "Schedule", "check_schedule", "draw"]

VERSION: Final = 1
_OF_WORKERS: Final = ("kill", "exit", "stop", "full", "jump")
_OF_NODES: Final = ("agent", "zygote", "off", "refuse", "handshake")
_OF_WAYS: Final = ("cut", "oneway", "flap", "reset", "slow")
_OF_SETS: Final = ("part", "swizzle")
_OF_ALL: Final = ("head",)
_OF_HEADS: Final = ("restart", "silence", "failpoint")
_DRAWN: Final = (*_OF_WORKERS, *_OF_NODES, *_OF_WAYS, *_OF_SETS)
KINDS: Final = (*_DRAWN, *_OF_ALL, *_OF_HEADS)
"""Kinds of faults. Of a worker: SIGKILL, an exit of its own, SIGSTOP for a while, a store without room for a while, and
a clock that jumps ahead. Of a node: the SIGKILL of its agent, the loss of its zygote, a host without power for a while,
a host that takes no new connections, and a host whose handshakes get lost. Of two hosts: neither reaches the other,
only one direction is cut, or both are by fits and starts; their connections are reset; the way between them is slow. Of
several hosts: they are cut off from the others, or each from all, one after another, and come back in another order. Of
the cluster: the head's own host is switched off for good, and the cluster ends. Of a head with a log, see `TAKE_OVER`:
the SIGKILL of its process, which is started again after a while, at once or at the next of one of
`simulation.failpoints.POINTS`, and a log that does not answer for a while."""
TAKE_OVER: Final = "head"
"""The workload of clusters whose head has a log that outlives it."""


WIRES: Final = ("python", "native")
"""The writers and readers of plain frames: the Python path of a session, or the native part."""
_NATIVE: Final = 10
"""One in this many seeds uses the native wire, unless the wire is given."""
_BEHEADED: Final = 1 / 16
"""The probability that a seed's cluster loses its head's host."""
_SHARE: Final = 0.4
"""The probability that a seed has a workload."""
_TAKEN_OVER: Final = 1 / 8
"""The probability that a seed has `TAKE_OVER` as well."""
_LARGE: Final = 64
"""Nodes above which a seed has it only where it is given."""


class BadSchedule(ValueError):
    """A file that is no schedule, with the error in one line."""


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        at: virtual seconds after the workloads begin.
        kind: one of `KINDS`.
        who: the host, the two hosts, or the set of hosts.
        seconds: how long the fault lasts, where it ends by itself; by how much a clock jumps.
        number: the number of the host's worker, modulo the number of living ones; that of a point.
    """

    at: float
    kind: str
    who: tuple[str, ...]
    seconds: float = 0.0
    number: int = 0

    def plain(self) -> dict[str, Any]:
        """The fault, in the types of files and JSON lines."""
        return {**asdict(self), "who": list(self.who)}


@dataclass(frozen=True)
class Schedule:
    """The full decision of a run, beside the package itself.

    Attributes:
        seed: the seed of all draws.
        nodes: the number of nodes.
        duration: virtual seconds of work and faults.
        workloads: the names of the program's workloads.
        settings: of every process.
        faults: the faults.
        wire: one of `WIRES`.
    """

    seed: int
    nodes: int
    duration: float
    workloads: tuple[str, ...]
    settings: dict[str, Any]
    faults: tuple[Fault, ...] = field(default=())
    wire: str = "python"

    @property
    def config(self) -> Config:
        """The settings of every process."""
        return Config(
            loop="asyncio", num_cpus=64, warn_after=0, log_to_driver=False, transports="local,tcp", **self.settings
        )

    def text(self) -> str:
        """The schedule as a TOML file."""
        lines = [
            f"version = {VERSION}", f"seed = {self.seed}", f"nodes = {self.nodes}", f"duration = {self.duration}",
            f"workloads = {json.dumps(list(self.workloads))}", f"wire = {json.dumps(self.wire)}", "", "[settings]",
            *(f"{name} = {json.dumps(value)}" for name, value in self.settings.items()),
        ]  # fmt: skip
        for fault in self.faults:
            lines += ["", "[[faults]]", *(f"{name} = {json.dumps(value)}" for name, value in fault.plain().items())]
        return "\n".join(lines) + "\n"

    @classmethod
    def read(cls, path: Path, known: Sequence[str]) -> Schedule:
        """The schedule in a file.

        Args:
            path: of the file.
            known: the names of all workloads.

        Raises:
            BadSchedule: the file cannot be read, is of another version, or names an unknown workload or host.
        """
        try:
            given = tomllib.loads(path.read_text("utf-8"))
        except OSError as error:
            raise BadSchedule(f"{path}: {error.strerror}") from error
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise BadSchedule(f"{path}: no schedule: {error}") from error
        version = given.pop("version", None)
        if version != VERSION:
            raise BadSchedule(f"{path}: version is {version!r}, this program reads {VERSION}")
        try:
            faults = tuple(Fault(**{**fault, "who": tuple(fault["who"])}) for fault in given.pop("faults", ()))
            made = cls(**{**given, "workloads": tuple(given["workloads"])}, faults=faults)
            check_schedule(made, known)
            made.config  # noqa: B018  # raises where a setting is wrong
        except (TypeError, KeyError, ValueError) as error:
            what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            raise BadSchedule(f"{path}: {what}") from error
        return made


def check_schedule(schedule: Schedule, known: Sequence[str]) -> None:
    """Check a schedule that was not drawn. `known` are the names of all workloads.

    Raises:
        ValueError: a workload, a wire, a host or a kind of fault is unknown, or a number is out of its range.
    """
    unknown = [name for name in schedule.workloads if name not in known]
    if unknown:
        raise ValueError(f"unknown workload {unknown[0]!r}; there are {', '.join(known)}")
    if schedule.wire not in WIRES:
        raise ValueError(f"unknown wire {schedule.wire!r}; there are {', '.join(WIRES)}")
    for name in ("seed", "nodes"):
        if type(getattr(schedule, name)) is not int:
            raise ValueError(f"{name} is {getattr(schedule, name)!r}, it must be a whole number")
    if not 1 <= schedule.nodes <= 4096:
        raise ValueError(f"nodes is {schedule.nodes}, 1 to 4096 are possible")
    duration: Any = schedule.duration
    if isinstance(duration, bool) or not isinstance(duration, int | float) or not 0 < duration < 1e6:
        raise ValueError(f"duration is {duration!r}, it must be above 0 and below 1e6 s")
    hosts = {f"h{number}" for number in range(schedule.nodes)}
    for fault in schedule.faults:
        if fault.kind not in KINDS:
            raise ValueError(f"unknown fault {fault.kind!r}; there are {', '.join(KINDS)}")
        if fault.kind in _OF_ALL and (fault.who != ("h0",) or schedule.nodes < 2):
            raise ValueError(f"a fault {fault.kind!r} is of ['h0'], in a cluster of two nodes or more")
        if fault.kind in _OF_HEADS and (fault.who != ("h0",) or TAKE_OVER not in schedule.workloads):
            raise ValueError(f"a fault {fault.kind!r} is of ['h0'], with the workload {TAKE_OVER!r}")
        away = [host for host in fault.who if host not in hosts]
        if away or not fault.who:
            raise ValueError(f"a fault names host {away[0] if away else ''!r}, there are h0 to h{schedule.nodes - 1}")
        for name in ("at", "seconds"):
            value = getattr(fault, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e6:
                raise ValueError(f"{name} of a fault is {value!r}, it must be 0 or more and below 1e6 s")
        if type(fault.number) is not int:
            raise ValueError(f"number of a fault is {fault.number!r}, it must be a whole number")


def draw(
    seed: int, nodes: int, duration: float, workloads: Sequence[str], known: Sequence[str], wire: str = "mixed"
) -> Schedule:
    """Draw the schedule of a seed.

    Args:
        seed: the number of the run.
        nodes: the number of nodes.
        duration: virtual seconds of work and faults.
        workloads: the workloads of the run; empty for some of `known`, drawn.
        known: the names of all workloads.
        wire: one of `WIRES`; ``"mixed"`` for the native one at each tenth seed.
    """
    if wire == "mixed":
        wire = WIRES[seed % _NATIVE == 0]
    rng = random.Random(f"{seed}/workloads")
    end = _end(nodes, duration, random.Random(f"{seed}/head"))
    heads = random.Random(f"{seed}/take-over")
    points = TAKE_OVER in workloads  # failpoints are for runs that ask for them
    if not workloads:
        others = [name for name in known if name != TAKE_OVER]
        workloads = [name for name in others if rng.random() < _SHARE] or [rng.choice(others)]
        taken = TAKE_OVER in known and heads.random() < _TAKEN_OVER and nodes <= _LARGE
        if taken and not end and "drains" not in workloads:  # a drain is not gone on with by the next head
            workloads.append(TAKE_OVER)
    if TAKE_OVER in workloads:
        end = _take_overs(duration, heads, points=points)
    rng = random.Random(f"{seed}/config")
    settings = {
        "recv_depth": rng.choice((4, 5, 8, 16, 64, 1024)),
        "eager_limit": rng.choice((64, 512, 4096, 16384)),
        "store_capacity": rng.choice((4 << 20, 8 << 20, 16 << 20, 64 << 20)),
        "store_keep_nbytes": rng.choice((0, 1 << 20)),
        "store_min_nbytes": rng.choice((4096, 65536)),
        "max_pending_calls": rng.choice((16, 64, 131072)),
        "idle_timeout": rng.choice((0.1, 0.5, 2.0, 300.0, 300.0)),
    }
    return Schedule(
        seed,
        nodes,
        duration,
        tuple(workloads),
        settings,
        tuple(_faults(nodes, duration, random.Random(f"{seed}/faults")) + end),
        wire,
    )


def _faults(nodes: int, duration: float, rng: random.Random) -> list[Fault]:
    hosts = [f"h{number}" for number in range(nodes)]
    others = hosts[1:]  # the head's own host stays, see `_end`
    kinds = [kind for kind in _DRAWN if rng.random() < 0.5]
    if nodes < 2:
        kinds = [kind for kind in kinds if kind in _OF_WORKERS]
    faults: list[Fault] = []
    if not kinds:
        return faults
    at = rng.expovariate(1 / 3)
    while at < duration:
        kind = rng.choice(kinds)
        number = rng.randrange(1 << 16)
        seconds = round(rng.choice((rng.uniform(0.01, 1), rng.uniform(1, 15))), 3)
        if kind in _OF_WORKERS:
            who: tuple[str, ...] = (rng.choice(hosts),)
        elif kind in _OF_NODES:
            who = (rng.choice(others),)
        elif kind in _OF_SETS:
            who = tuple(rng.sample(hosts, rng.randint(1, nodes - 1)))
        else:
            who = tuple(rng.sample(hosts, 2))
        faults.append(Fault(round(at, 3), kind, who, seconds, number))
        at += rng.expovariate(1 / 3)
    return faults


def _end(nodes: int, duration: float, rng: random.Random) -> list[Fault]:
    """The end of the cluster, where it is to end before the run does: late, so that there is much to lose."""
    if nodes < 2 or rng.random() >= _BEHEADED:
        return []
    return [Fault(round(rng.uniform(0.4, 0.9) * duration, 3), _OF_ALL[0], ("h0",))]


def _take_overs(duration: float, rng: random.Random, *, points: bool) -> list[Fault]:
    """The ends of heads that are started again, some of them within the next take-over, and the silences of their
    log."""
    faults: list[Fault] = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        at, more = rng.uniform(0.05, 0.9) * duration, True
        while more and at < duration:
            seconds = rng.choice((rng.uniform(0.1, 2), rng.uniform(2, 5), rng.uniform(5, 12)))
            faults.append(Fault(round(at, 3), "restart", ("h0",), round(seconds, 3)))
            at += seconds + rng.choice((rng.uniform(0, 0.5), rng.uniform(0, 10)))
            more = rng.random() < 0.3
    for _ in range(rng.choice((0, 0, 1, 2))):
        at = rng.uniform(0.05, 0.9) * duration
        faults.append(Fault(round(at, 3), "silence", ("h0",), round(rng.choice((1.0, rng.uniform(1, 12))), 3)))
    for _ in range(rng.choice((0, 1, 2, 3)) if points else 0):
        at, seconds = rng.uniform(0.02, 0.8) * duration, rng.choice((rng.uniform(0.1, 2), rng.uniform(2, 8)))
        faults.append(Fault(round(at, 3), "failpoint", ("h0",), round(seconds, 3), rng.randrange(1 << 16)))
    return faults
