"""Heads that may die: their logs, and the time until the control plane is back; see `benchmarks.engines`."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import time
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from benchmarks.harness import Measurement, Unmeasured, at_most, exactly
from benchmarks.serving import ITEM, PATIENCE, BareEtcd, Serving, head_of, measured, start, start_head, zcactor
from tests.driver.programs import until
from tests.engines.etcds import Etcd
from tests.engines.etcds import missing as no_etcd
from tests.engines.launching import User, unused_ports
from zcactor.control.etcd_log import TTL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from benchmarks.harness import Scale

__all__ = ["deaths", "restarts", "spawns"]

BACK: Final = 1.5
"""Budget: a head that was killed, next to its first start."""
COMMITS: Final = 3
"""Commits that a spawn may cost."""
SINGLE: Final = 15
"""Spawns one after the other with each log, in each turn."""
TURNS: Final = 7
"""Turns at least: fewer clusters would decide what their logs cost."""
TOGETHER: Final = 100
"""Actors that are spawned at once."""
AT_ONCE: Final = 1.3
"""Budget: so many spawns with a log next to those without."""
TAKEN_OVER: Final = min(TTL + 2.0, 8.0)
"""Budget: seconds from the death of a head until a standby decides."""
RESUMED: Final = 12.0
"""Budget: the same from the moment at which a head is stopped."""
STOPPED: Final = 20.0
"""Seconds for which a head is stopped."""
LONGEST: Final = 5.0
"""Budget: the longest call between actors around a take-over next to the longest before."""
BEFORE: Final = 10.0
"""Seconds before a take-over in which calls are looked at."""
DECISIONS: Final = 10
"""Spawns that are asked for while there is no head."""

_ONE: Final = {"in a file": "a spawn with a log in a file", "in etcd": "a spawn with a log in etcd"}
_MANY: Final = {"in a file": "spawns at once with a log in a file", "in etcd": "spawns at once with a log in etcd"}
_BACK: Final = "a head with a standby is killed, until the control plane is back"
_FAILED: Final = "a head with a standby is killed: failed calls"
_CALLS: Final = "a head with a standby is killed: longest call between actors"
_STOP: Final = "a head with a standby is stopped, until the control plane is back"
_SURPLUS: Final = "a head that was stopped goes on: actors that it still makes"


def _absent(*names: str) -> Iterator[Unmeasured]:
    """The lines of measures that need an etcd, where none can run."""
    reason = no_etcd()
    assert reason is not None
    for name in names:
        yield Unmeasured(ITEM, name, reason)


def restarts(scale: Scale) -> Iterator[Measurement]:
    """A head that is killed and started again."""
    first, again = list[float](), list[float]()
    for _ in range(scale.runs):
        with User() as user:
            arguments = ("--head", "--port", str(unused_ports(1)[0]))
            first.append(start(user, *arguments))
            os.kill(head_of(user)["pid"], signal.SIGKILL)
            again.append(start(user, *arguments))
            zcactor(user, "stop")
    yield measured("a head that was killed, until it leads again", again, "s", at_most(BACK), first, "its first start")


class _BareFile:
    """A database of SQLite that makes bare commits, durable at their return as those of a head's log are."""

    def __init__(self, folder: Path) -> None:
        self._database = sqlite3.connect(folder / "bare.db", isolation_level=None)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=FULL")
        self._database.execute("CREATE TABLE t (k INTEGER PRIMARY KEY, v BLOB)")

    def commit(self) -> None:
        """Make a commit."""
        self._database.execute("INSERT INTO t (v) VALUES (?)", (b"x" * 200,))

    def close(self) -> None:
        """Close the database."""
        self._database.close()


class _Spawning:
    """Clusters without a log and with each kind of log, in which spawns are measured in turns.

    Attributes:
        one: milliseconds of a single spawn, by the place of the log.
        commits: milliseconds of a bare commit to each kind of log.
        many: seconds of so many spawns at once.
    """

    def __init__(self, etcd: Etcd | None) -> None:
        self._etcd = etcd
        self.one = {where: list[float]() for where in ("", "in a file", *(["in etcd"] if etcd else []))}
        self.commits = {where: list[float]() for where in self.one if where}
        self.many = {where: list[float]() for where in self.one}

    def turn(self, number: int, count: int) -> None:
        """Measure in new clusters: one is slower than the next for no reason of its own, by a few percent.

        Args:
            number: of the turn.
            count: spawns at once.
        """
        with contextlib.ExitStack() as undo:
            users = {where: undo.enter_context(User()) for where in self.one}
            start(users[""], "--head", "--port", "0")
            start_head(users["in a file"])
            file = undo.enter_context(contextlib.closing(_BareFile(users["in a file"].folder)))
            bare = {"in a file": file.commit}
            if self._etcd is not None:
                start_head(users["in etcd"], "--directory", self._etcd.url(f"spawns{number}"))
                bare["in etcd"] = undo.enter_context(contextlib.closing(BareEtcd(self._etcd))).commit
            sides = {where: Serving(user, ZCACTOR_ADDRESS=head_of(user)["address"]) for where, user in users.items()}
            self._measure(sides, bare, number, count)
            for where, serving in sides.items():
                serving.end()
                zcactor(users[where], "stop")

    def _measure(
        self, sides: Mapping[str, Serving], bare: Mapping[str, Callable[[], None]], number: int, count: int
    ) -> None:  # fmt: skip
        order = sorted(sides, reverse=bool(number % 2))
        one: dict[str, list[float]] = {where: [] for where in sides}
        commits: dict[str, list[float]] = {where: [] for where in bare}
        for where in order:
            sides[where].ask("spawn", 1)
        for _ in range(SINGLE):  # each in turns with the others: a store that was idle is slower than a busy one
            for where in order:
                one[where].append(1e3 * sides[where].ask("spawn", 1))
                if where in bare:
                    before = time.perf_counter()
                    bare[where]()
                    commits[where].append(1e3 * (time.perf_counter() - before))
        for where in order:
            self.one[where].append(median(one[where]))
            self.many[where].append(sides[where].ask("spawn", count))
        for where in bare:
            self.commits[where].append(median(commits[where]))

    def floors(self, where: str) -> list[float]:
        """Milliseconds of a spawn without a log and `COMMITS` bare commits, in each turn."""
        return [one + COMMITS * commit for one, commit in zip(self.one[""], self.commits[where], strict=True)]


def spawns(scale: Scale) -> Iterator[Measurement | Unmeasured]:
    """Spawns with a log next to those without."""
    count = scale.count(TOGETHER, 20)
    with contextlib.ExitStack() as undo:
        measuring = _Spawning(Etcd(undo.enter_context(User())) if no_etcd() is None else None)
        for number in range(max(scale.runs, TURNS)):
            measuring.turn(number, count)
    for where in measuring.commits:
        yield measured(_ONE[where], measuring.one[where], "ms", at_most(1.0), measuring.floors(where),
                       f"one without a log and {COMMITS} bare commits")  # fmt: skip
        yield measured(_MANY[where], measuring.many[where], "s", at_most(AT_ONCE), measuring.many[""],
                       f"{count} without a log")  # fmt: skip
    if "in etcd" not in measuring.commits:
        yield from _absent(_ONE["in etcd"], _MANY["in etcd"])


class _Pair:
    """A head and a standby, each of which takes over from the other, on made-up hosts of one user."""

    def __init__(self, user: User, etcd: Etcd) -> None:
        self.user = user
        self._url = etcd.url("deaths")
        self._hosts: list[dict[str, str]] = []
        for name in "ab":
            (user.folder / name).mkdir(mode=0o700)
            self._hosts.append({"XDG_RUNTIME_DIR": str(user.folder / name)})
        self.addresses = [start_head(user, "--directory", self._url, **self._hosts[0])]
        self.addresses.append(start_head(user, "--directory", self._url, "--standby", **self._hosts[1]))
        self.wait_for_standby()

    def _head(self) -> dict[str, Any]:
        return head_of(self.user, "--address", ",".join(self.addresses))

    def wait_for_standby(self) -> None:
        """Wait until the head knows of its standby."""
        until(lambda: len(self._head()["standbys"]) == 1, "a standby that the head knows", PATIENCE)

    def signal(self, number: signal.Signals) -> tuple[int, float]:
        """Send a signal to the head that leads; its pid, and the moment."""
        pid = self._head()["pid"]
        now = time.monotonic()
        os.kill(pid, number)
        return pid, now

    def deposed(self) -> int:
        """The number of times that a head has said that it decides no more."""
        logs = (self.user.folder / "state" / "zcactor" / "logs").glob("*")
        return sum(log.read_text(errors="replace").count("this head decides no more") for log in logs)

    def again(self) -> None:
        """Start the head again that was killed, as a standby."""
        at = self.addresses.index(self._head()["address"])
        host, port = 1 - at, self.addresses[1 - at].rpartition(":")[2]
        start(
            self.user, "--head", "--port", port, "--directory", self._url, "--standby", **self._hosts[host]
        )  # fmt: skip
        self.wait_for_standby()

    def end(self) -> None:
        """End the cluster in order."""
        zcactor(self.user, "stop", "--cluster", "--address", ",".join(self.addresses))


def deaths(scale: Scale) -> Iterator[Measurement | Unmeasured]:
    """Heads with a standby that are stopped for a while, and killed, while actors call each other."""
    if no_etcd() is not None:
        yield from _absent(_BACK, _FAILED, _CALLS, _STOP, _SURPLUS)
        return
    back, stopped, longest, before = list[float](), list[float](), list[float](), list[float]()
    failed, surplus = list[float](), list[float]()
    with User() as owner, User() as user:
        pair = _Pair(user, Etcd(owner))
        serving = Serving(user, ZCACTOR_ADDRESS=",".join(pair.addresses))
        serving.ask("begin_calls")
        rounds = scale.count(2)
        for number in range(rounds):
            said = pair.deposed()
            pid, at = pair.signal(signal.SIGSTOP)
            stopped.append(serving.ask("decide", DECISIONS) - at)
            rest = max(0.0, at + min(STOPPED, scale.count(200)) - time.monotonic())
            time.sleep(rest)  # the head is stopped for that long: this is what is measured
            os.kill(pid, signal.SIGCONT)
            until(lambda said=said: pair.deposed() > said, "a head that stands by again", PATIENCE)  # type: ignore[misc]
            pair.wait_for_standby()
            surplus.append(serving.ask("surplus"))
            serving.ask("take")
            time.sleep(min(BEFORE, scale.count(100)))  # calls go on, and their longest is the floor
            _, _, most = serving.ask("take")
            before.append(1e3 * most)
            _, at = pair.signal(signal.SIGKILL)
            back.append(serving.ask("decide", DECISIONS) - at)
            _, lost, most = serving.ask("take")
            failed.append(lost)
            longest.append(1e3 * most)
            if number < rounds - 1:
                pair.again()
        serving.end()
        pair.end()
    yield measured(_BACK, back, "s", at_most(TAKEN_OVER, "value"))
    yield measured(_FAILED, [sum(failed)], "", exactly(0))
    yield measured(_CALLS, longest, "ms", at_most(LONGEST), before, "the longest before")
    yield measured(_STOP, stopped, "s", at_most(RESUMED, "value"))
    yield measured(_SURPLUS, [max(surplus)], "", exactly(0))
