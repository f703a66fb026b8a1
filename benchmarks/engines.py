"""Runs under launchers, and heads that may die: the seconds that users wait, or ratios to a floor of the same run.

::

    python -m benchmarks.engines                # everything that the engines at hand allow
    python -m benchmarks.engines --quick        # fewer runs
    python -m benchmarks.engines deaths drains  # two parts of it

Nodes are processes of this machine, of a made-up user. Real engines are taken where they are installed
(``make engines``); a measure whose engine is missing says why, in the place of a figure. Times of a launcher begin when
the process of its last rank does: how long the launcher takes to start them is its own.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import psutil

from benchmarks.harness import Measurement, Scale, Unmeasured, at_most, exactly, options_of, report, show, spread
from tests.driver.programs import processes, until
from tests.engines.etcds import Etcd
from tests.engines.etcds import missing as no_etcd
from tests.engines.launching import User, unused_ports
from tests.engines.ray_user import RayUser
from tests.engines.ray_user import missing as no_ray
from tests.engines.slurm_cluster import kill_node, slurm
from tests.engines.slurm_cluster import missing as no_slurm
from zcactor.control.etcd_log import TTL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import IO

    from benchmarks.harness import Budget


__all__ = ["PARTS", "main", "measure"]


# ---- clusters of a made-up user

ITEM: Final = "engines"
ZCACTOR: Final = (sys.executable, "-m", "zcactor")
PATIENCE: Final = 120.0
"""Seconds after which a benchmark gives up."""


def measured(
    name: str, values: Sequence[float], unit: str, budget: Budget, floors: Sequence[float] = (), floor_name: str = ""
) -> Measurement:
    """The measurement of the median of some values, next to the median of their floors."""
    floor = median(floors) if floors else None
    return Measurement(ITEM, name, median(values), unit, floor, floor_name, budget, len(values), spread=spread(values))


class Serving:
    """The program `benchmarks.measuring` under way, in a run, beside nodes, or on Ray.

    Args:
        user: the user, whose folder it is in.
        command: the words before the interpreter and the program.
        environ: further variables.
    """

    def __init__(self, user: User, *command: str, **environ: str) -> None:
        with open(user.folder / "measuring.out", "w") as errors:
            self._process = subprocess.Popen(
                [*command, sys.executable, "-m", "benchmarks.measuring"], env={**user.variables, **environ},
                cwd=user.folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                start_new_session=True,
            )  # fmt: skip
        self._errors = user.folder / "measuring.out"
        if self.answer() != "ready":
            raise RuntimeError(f"{' '.join(command)} did not begin to measure")

    def _said(self) -> str:
        return self._errors.read_text(errors="replace")[-500:]

    def ask(self, name: str, *arguments: Any) -> Any:
        """Call a method of the program; its result."""
        self.tell(name, *arguments)
        return self.answer()

    def tell(self, name: str, *arguments: Any) -> None:
        """Begin to call a method of the program, whose result `answer` returns."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """Wait for the result of the method."""
        output: IO[str] | None = self._process.stdout
        assert output is not None
        while not (line := output.readline()).startswith("@"):  # Ray prints as well
            if not line:
                raise RuntimeError(f"the program has ended: {self._said()}")
        return json.loads(line[1:])

    def end(self) -> None:
        """Let the program end in order."""
        self._process.communicate(timeout=PATIENCE)
        if self._process.returncode:
            raise RuntimeError(f"the program has ended with {self._process.returncode}: {self._said()}")


def start(user: User, *arguments: str, **environ: str) -> float:
    """Run ``zcactor start``, which returns when all that it starts is ready; the seconds."""
    return seconds_of(user, *ZCACTOR, "start", *arguments, **environ)


def start_head(user: User, *arguments: str, **environ: str) -> str:
    """Start a head at an unused port, or a standby; its address."""
    port = unused_ports(1)[0]
    start(user, "--head", "--port", str(port), *arguments, **environ)
    return f"127.0.0.1:{port}"


def zcactor(user: User, *arguments: str, **environ: str) -> str:
    """Run a command of zcactor's; return its output."""
    done = subprocess.run(
        [*ZCACTOR, *arguments], env={**user.variables, **environ}, cwd=user.folder, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"zcactor {' '.join(arguments)} ended with {done.returncode}: {done.stderr}")
    return done.stdout


def head_of(user: User, *arguments: str) -> dict[str, Any]:
    """The head's line of ``zcactor status``."""
    found: dict[str, Any] = json.loads(zcactor(user, "status", "--json", *arguments))["head"]
    return found


def seconds_of(user: User, *command: str, **environ: str) -> float:
    """Run a command to its end; the seconds."""
    before = time.perf_counter()
    done = subprocess.run(
        command, env={**user.variables, **environ}, cwd=user.folder, capture_output=True, text=True, check=False
    )
    seconds = time.perf_counter() - before
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-500:]}")
    return seconds


def place(user: User, rank: int, size: int) -> dict[str, str]:
    """The variables of a rank of a run without a launcher."""
    return {
        "ZCACTOR_RANK": str(rank), "ZCACTOR_SIZE": str(size), "ZCACTOR_RUN": user.mark, "ZCACTOR_HEAD": "127.0.0.1"
    }  # fmt: skip


class BareEtcd:
    """A client of etcd that makes bare commits, over one connection."""

    _BODY: Final = json.dumps({"key": "YmFyZQ==", "value": base64.b64encode(b"x" * 200).decode()}).encode()

    def __init__(self, etcd: Etcd) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", etcd.ports[0], timeout=PATIENCE)

    def commit(self) -> None:
        """Make a commit."""
        self._connection.request("POST", "/v3/kv/put", self._BODY)
        answer = self._connection.getresponse()
        answer.read()
        if answer.status != http.client.OK:
            raise RuntimeError(f"etcd has answered {answer.status}")

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


# ---- heads that may die

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


# ---- nodes that engines have placed

PLACED: Final = 1.1
"""Budget: calls between nodes that something else placed, next to nodes that were started one by one."""
DRAINED: Final = 2.0
"""Budget: the drain of a node next to the spawns of its actors."""
IDLE: Final = 50
"""Actors of a node that is drained."""
_STORE: Final = {"ZCACTOR_STORE_CAPACITY": str(1 << 28)}

_RUN, _RAY, _ETCD = "of a run", "placed by Ray", "with the head's log in etcd"
_MEASURES: Final = (
    ("call", "call with an int to another node"),
    ("array", "call with an array of 64 MiB to another node"),
)
"""The program's command, and the name of the measure."""
_ROUNDS: Final = 16
"""Rounds for each run: as many short ones in turns meet quiet moments of the machine on every side."""
_CALLS_OF_A_ROUND: Final = 200
"""Calls of a round."""


def _user(undo: contextlib.ExitStack) -> User:
    user = undo.enter_context(User())
    user.variables.update(_STORE)
    return user


def _beside(undo: contextlib.ExitStack, user: User, address: str) -> Serving:
    """A program of a cluster, to which a second node is added."""
    start(user, "--address", address)
    undo.callback(zcactor, user, "stop")
    return Serving(user, ZCACTOR_ADDRESS=address)


def _in_run(undo: contextlib.ExitStack) -> Serving:
    user = _user(undo)
    member = user.start(*ZCACTOR, "run", "--", "true", name="member", **place(user, 1, 2))
    undo.callback(member.wait, PATIENCE)
    return Serving(user, *ZCACTOR, "run", "--", **place(user, 0, 2))


def calls(scale: Scale) -> Iterator[Measurement | Unmeasured]:
    """Calls and arrays between nodes of a run, of Ray, or with a log in etcd, next to nodes started one by one."""
    with contextlib.ExitStack() as undo:
        ray = None
        if no_ray() is None:  # it starts beside the others
            ray = undo.enter_context(RayUser(**_STORE))
        plain = _user(undo)
        start(plain, "--head", "--port", "0")
        sides = {"": _beside(undo, plain, head_of(plain)["address"]), _RUN: _in_run(undo)}
        if no_etcd() is None:
            etcd, user = Etcd(undo.enter_context(User())), _user(undo)
            sides[_ETCD] = _beside(undo, user, start_head(user, "--directory", etcd.url("calls")))
        if ray is not None:
            ray.wait_for_ray()
            undo.callback(ray.end_ray)
            sides[_RAY] = Serving(ray)
        for serving in sides.values():
            undo.callback(serving.end)
            serving.ask("warm")
        for command, name in _MEASURES:
            found: dict[str, list[float]] = {side: [] for side in sides}
            for turn in range(_ROUNDS * scale.runs):
                for side in sorted(sides, reverse=bool(turn % 2)):
                    found[side].append(1e6 * sides[side].ask(command, scale.count(_CALLS_OF_A_ROUND)))
            for side in (_RUN, _RAY, _ETCD):
                if side in found:
                    yield measured(f"{name} {side}", found[side], "us", at_most(PLACED), found[""],
                                   "nodes started one by one")  # fmt: skip
    for side, reason in ((_RAY, no_ray()), (_ETCD, no_etcd())):
        if reason is not None:
            for _, name in _MEASURES:
                yield Unmeasured(ITEM, f"{name} {side}", reason)


def drains(scale: Scale) -> Iterator[Measurement]:
    """A node with idle actors that may restart is drained, while they are called one after the other."""
    spawned, drained, failed = list[float](), list[float](), 0
    with User() as user:
        address = start_head(user)
        serving = Serving(user, ZCACTOR_ADDRESS=address)
        count = min(IDLE, scale.count(2 * IDLE, 2))
        for _ in range(scale.count(5)):
            start(user, "--address", address)
            before, seconds, _, lost = serving.ask("drained", count)
            spawned.append(before)
            drained.append(seconds)
            failed += lost
        serving.end()
        zcactor(user, "stop")
    yield measured(
        f"drain of a node with {IDLE} idle actors", drained, "s", at_most(DRAINED), spawned, f"{count} spawns at once"
    )
    yield measured(f"drain of a node with {IDLE} idle actors: failed calls", [failed], "", exactly(0))


# ---- runs under launchers

LAUNCHED: Final = 2.0
"""Budget: seconds from the start of the last rank's process to the first line of the program."""
STARTS: Final = 2.5
"""Budgets: a head next to an interpreter with NumPy, and a whole run next to a head."""
HEAD_MIB: Final = 40.0
ORDERLY: Final = 5.0
"""Budget: seconds from SIGTERM until no process is left, all actors being closed."""
LOST: Final = 7.0
"""Budget: seconds until a node whose processes were killed is lost, and said to be."""
NODES: Final = 8
RANKS: Final = 4
FULL, QUICK = Scale(7, 1.0), Scale(3, 0.5)


def _starts(scale: Scale) -> Iterator[Measurement]:
    """The start of a head, and a whole run without a launcher."""
    numpy, head, run = list[float](), list[float](), list[float]()
    for _ in range(scale.runs):
        with User() as user:
            numpy.append(seconds_of(user, sys.executable, "-c", "import numpy"))
            head.append(start(user, "--head", "--port", str(unused_ports(1)[0])))
            zcactor(user, "stop")
            run.append(seconds_of(user, *ZCACTOR, "run", "--", "true"))
    yield measured("zcactor start --head, until it is ready", head, "s", at_most(STARTS), numpy,
                    "an interpreter with NumPy")  # fmt: skip
    yield measured("zcactor run -- true", run, "s", at_most(STARTS), head, "zcactor start --head")


def _memory(scale: Scale) -> Iterator[Measurement]:
    """The memory of the head's process."""
    with User() as user:
        start(user, "--head", "--port", "0")
        head = head_of(user)
        for _ in range(1, NODES):
            start(user, "--address", head["address"])
        found = [psutil.Process(head["pid"]).memory_full_info().pss / (1 << 20) for _ in range(scale.runs)]
        yield measured(f"memory of a head with {NODES} nodes", found, "MiB", at_most(HEAD_MIB, "value"))
        zcactor(user, "stop")


@contextlib.contextmanager
def _running(size: int) -> Iterator[tuple[User, list[subprocess.Popen[str]]]]:
    """A run of some ranks without a launcher, whose program has an actor on each node: the user, and the ranks'
    processes."""
    with User() as user:
        command = (*ZCACTOR, "run", "--", sys.executable, "waiting.py")
        ranks = [user.start(*command, name=f"rank-{rank}", **place(user, rank, size)) for rank in range(size)]
        until(lambda: "up" in user.text("rank-0"), "the program", PATIENCE)
        yield user, ranks


def _ends(scale: Scale) -> Iterator[Measurement]:
    """Runs that are told to end, and runs that lose a node."""
    ended, lost = list[float](), list[float]()
    for _ in range(scale.count(4, 2)):
        with _running(RANKS) as (user, ranks):
            before = time.perf_counter()
            for process in ranks:
                process.send_signal(signal.SIGTERM)
            until(lambda mark=user.mark: not processes(mark), "processes to end", PATIENCE)  # type: ignore[misc]
            ended.append(time.perf_counter() - before)
            if len(user.closed()) != RANKS:
                raise RuntimeError(f"{len(user.closed())} of {RANKS} actors were closed")
        with _running(2) as (user, ranks):
            member = psutil.Process(ranks[1].pid)
            before = time.perf_counter()
            for each in (member, *member.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            until(lambda user=user: "left" in user.text("rank-0"), "the loss", PATIENCE)  # type: ignore[misc]
            lost.append(time.perf_counter() - before)
            ranks[0].send_signal(signal.SIGTERM)
            ranks[0].wait(PATIENCE)
    yield measured(
        f"SIGTERM to a run of {RANKS} ranks, until no process is left", ended, "s", at_most(ORDERLY, "value")
    )
    yield measured("a node of a run is killed, until it is lost", lost, "s", at_most(LOST, "value"))


_TELLING: Final = "import time; print('program', time.time(), flush=True)"
_NOTING: Final = 'date +%s.%N >> "$STARTS"; exec "$0" -m zcactor run -- "$0" -c "$1"'


def _launched(user: User, scale: Scale, *launcher: str) -> list[float]:
    """Seconds from the start of the last rank's process to the program's first line, of several runs."""
    found = list[float]()
    for number in range(scale.runs):
        starts = user.folder / f"starts-{number}"
        status, text = user.done(*launcher, "/bin/sh", "-c", _NOTING, sys.executable, _TELLING, STARTS=str(starts))
        told = re.search(r"program ([\d.]+)", text)
        if status or told is None:
            raise RuntimeError(f"{launcher[0]} ended with {status}: {text[-300:]}")
        found.append(float(told[1]) - max(map(float, starts.read_text().split())))
    return found


def _mpi(scale: Scale) -> Iterator[Measurement | Unmeasured]:
    """Runs under Open MPI."""
    name = f"a run of {RANKS} ranks under mpirun, until the program runs"
    mpirun = shutil.which("mpirun.openmpi")
    if mpirun is None:
        yield Unmeasured(ITEM, name, "mpirun.openmpi is not installed: make engines does that as root on Debian")
        return
    with User() as user:
        found = _launched(user, scale, mpirun, "--allow-run-as-root", "--oversubscribe", "-n", str(RANKS))
    yield measured(name, found, "s", at_most(LAUNCHED, "value"))


_LOSING: Final = """
import asyncio, os
import zcactor as zc

@zc.actor
class Kept:
    def node(self): return os.environ["SLURMD_NODENAME"]

async def main():
    async with zc.init():
        nodes = [node.node_id for node in await zc.nodes()]
        moving = [await Kept.options(node="spread", num_cpus=0, max_restarts=-1).spawn() for _ in nodes]
        fixed = [await Kept.options(node=node, num_cpus=0).spawn() for node in nodes]
        one, victim = moving[-1], await moving[-1].node()
        others = [actor for actor in fixed if await actor.node() == victim]

        async def moved():
            while True:
                try:
                    if await one.node() != victim: return
                except zc.ZcactorError:
                    await asyncio.sleep(0.01)

        async def dead():
            while True:
                try:
                    await others[0].node()
                except zc.ActorDied:
                    return
                except zc.ZcactorError:
                    await asyncio.sleep(0.01)

        print("victim", victim, flush=True)
        await asyncio.gather(moved(), dead())
        print("lost", flush=True)

zc.run(main())
"""
"""A program that says which of its nodes to kill, and when an actor of that node is elsewhere and another is dead."""


def _cancelled(user: User) -> float:
    """Seconds from ``scancel`` of a run until its actors are closed and no process is left."""
    process = user.start(*_SRUN, f"-N{NODES}", *ZCACTOR, "run", "--", sys.executable, "waiting.py")
    user.says("up")
    _, job = user.done_beside("squeue", "-h", "-o", "%A")
    before = time.perf_counter()
    user.done_beside("scancel", job.strip())
    user.ended({"SLURM_JOB_ID": job.strip(), "SLURM_STEP_ID": "0"})
    seconds = time.perf_counter() - before
    process.wait(PATIENCE)
    if len(user.closed()) != NODES:
        raise RuntimeError(f"{len(user.closed())} of {NODES} actors were closed")
    for name in user.closed():
        (user.folder / name).unlink()
    return seconds


def _bereft(user: User, lost: list[str]) -> float:
    """Seconds from the death of a node, whose name is added to those that are lost, until an actor of it is elsewhere
    and another is known to be dead."""
    command = (*_SRUN, f"-N{NODES - len(lost)}", *([f"--exclude={','.join(lost)}"] if lost else []))
    process = user.start(*command, *ZCACTOR, "run", "--", sys.executable, "-c", _LOSING)
    user.says("victim")
    found = re.search(r"victim (\w+)", user.text())
    assert found is not None
    before = time.perf_counter()
    kill_node(user, found[1])
    user.says("lost")
    seconds = time.perf_counter() - before
    lost.append(found[1])
    process.terminate()
    process.wait(PATIENCE)
    return seconds


_SRUN: Final = ("srun", "--ntasks-per-node=1", "--no-kill")


def _slurm(scale: Scale) -> Iterator[Measurement | Unmeasured]:
    """Runs under Slurm, whose nodes are virtual ones of this machine."""
    begins, ends, losses = (
        f"a run on {NODES} nodes of Slurm, until the program runs",
        f"scancel of a run on {NODES} nodes of Slurm, until no process is left",
        "a node of Slurm is killed, until its actors are elsewhere or dead",
    )
    reason = no_slurm()
    if reason is not None:
        for name in (begins, ends, losses):
            yield Unmeasured(ITEM, name, reason)
        return
    with slurm(NODES) as user:
        found = _launched(user, scale, *_SRUN, f"-N{NODES}")
        yield measured(begins, found, "s", at_most(LAUNCHED, "value"))
        found = [_cancelled(user) for _ in range(scale.count(2))]
        yield measured(ends, found, "s", at_most(ORDERLY, "value"))
        lost = list[str]()
        found = [_bereft(user, lost) for _ in range(scale.count(2))]
        yield measured(losses, found, "s", at_most(LOST, "value"))


PARTS: Final[Mapping[str, Callable[[Scale], Iterator[Measurement | Unmeasured]]]] = {
    "starts": _starts, "memory": _memory, "restarts": restarts, "spawns": spawns, "deaths": deaths, "calls": calls,
    "drains": drains, "ends": _ends, "mpi": _mpi, "slurm": _slurm,
}  # fmt: skip


def measure(scale: Scale, parts: Sequence[str] = ()) -> Iterator[Measurement | Unmeasured]:
    """Measure what the engines at hand allow: these parts, or all."""
    for name in parts or PARTS:
        yield from PARTS[name](scale)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and show.

    Returns:
        0; 1 with ``--strict`` when a budget does not hold.
    """
    options = options_of("benchmarks.engines", "Launchers, and heads that may die.", PARTS).parse_args(arguments)
    lines = list(measure(QUICK if options.quick else FULL, options.parts))
    found = [line for line in lines if isinstance(line, Measurement)]
    show("Launchers, and heads that may die", found)
    return report(options, found, [line for line in lines if isinstance(line, Unmeasured)])


if __name__ == "__main__":
    sys.exit(main())
