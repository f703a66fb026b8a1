"""Networks that are cut between heads, nodes and a real etcd, members of etcd that are killed, and heads that stop.

Programs make calls of all kinds meanwhile, and each instance of an actor shows when it has lived. `make test-engines`
installs etcd and nftables.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial

import pytest

from tests.driver.programs import until
from tests.engines.sites import PATIENCE, Site, reason
from tests.hosts.netns import Host, Program

pytestmark = [
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.timeout(600),
    pytest.mark.skipif(reason() is not None, reason=str(reason())),
]

NODES_WAIT = 8.0
"""Seconds that nodes go on without a head: longer than by default, for a slow machine."""
AWAY = 20.0
"""Seconds that etcd or a head is stopped."""
BACK = 16.0
"""Seconds until a cluster whose head was killed, or whose etcd was away, decides again: twice those promised."""
LEADS = 24.0
"""Seconds until a standby leads in the place of a head that is stopped: twice those promised."""
KINDS = {"call", "stream", "actor to actor", "array", "promise"}
_numbers = itertools.count()


class Kept:
    """One site for all tests of this module, and another one after each test that fails."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self.site: Site | None = None

    @contextlib.contextmanager
    def lent(self) -> Iterator[Site]:
        """A site with a head, a standby and four nodes. The test leaves it like that."""
        if self.site is None:
            self.site = self._stack.enter_context(Site(3, head_patience=str(NODES_WAIT)))
        site, self.site = self.site, None
        with ExitStack() as undo:
            undo.push(self._stack.pop_all())
            yield site
            self._stack = undo.pop_all()
        self.site = site

    def end(self) -> None:
        with self._stack:
            if self.site is not None:
                self.site.end()


@pytest.fixture(scope="module")
def kept() -> Iterator[Kept]:
    kept = Kept()
    yield kept
    kept.end()


class Loaded:
    """A site with a program on ``c`` that loads it: an actor on each node, which restarts elsewhere.

    Attributes:
        leads, stands_by: the hosts of the head and of the standby.
        program: the program.
    """

    def __init__(self, site: Site, program: Program) -> None:
        self.site, self.program = site, program
        self.leads, self.stands_by = site.a, site.b
        if not self.is_led_by(site.a):
            self.leads, self.stands_by = site.b, site.a
        self._prefix = f"t{next(_numbers)}"
        self.names: list[str] = []
        assert sorted(program.ask("nodes")) == ["a", "b", "c", "d"]
        self._at = {}
        for number in range(4):
            name = self.add(f"loaded-{number}")
            self._at[program.ask("spawn", name=name)] = name
        assert sorted(self._at) == ["a", "b", "c", "d"], "actors are spread over all nodes"
        program.ask("load", names=self.names)
        self.goes_on()

    def is_led_by(self, host: Host) -> bool:
        """Whether the head of a host leads, as it says itself."""
        leader: str = self.program.ask("leader")["address"]
        return leader.startswith(f"{host.address}:")

    def on(self, host: Host) -> str:
        """The name of the actor that began on a host."""
        return self._at[host.name]

    def goes_on(self) -> None:
        """Wait until operations of all kinds have succeeded that began from now on."""
        before = self.program.ask("operations")
        enough = 2 * len(self.names)

        def more() -> bool:
            now = self.program.ask("operations")
            return all(now.get(kind, 0) >= before.get(kind, 0) + enough for kind in KINDS)

        until(more, "operations that succeed", PATIENCE)

    def spawns(self, what: str, patience: float = PATIENCE) -> None:
        """Check that a spawn succeeds in time, and that the new actor is found."""
        name = self.add(what)
        self.program.answer(self.program.send("spawn", name=name), patience)
        assert self.program.ask("found", name=name)[2] == 1

    def add(self, what: str) -> str:
        """The name of one more actor, which is to live at the end."""
        self.names.append(f"{self._prefix}-{what}")
        return self.names[-1]

    def check(self) -> None:
        """Check that each actor lives once and has lived once at a time, and that the head says so, too."""
        self.site.check_lives(self.names)
        found = self.program.ask("names")
        assert found == sorted(self.names), found

    def end(self, across: Sequence[Host] = ()) -> None:
        """End the load. No operation may have failed but those with actors of hosts that were cut off."""
        cut = {self.on(host) for host in across}
        wrong = [failure for failure in self.program.ask("rest") if not cut & {*failure[1]}]
        assert not wrong, wrong
        self.check()
        self.program.ask("kill", names=self.names)
        until(lambda: not self.site.living(), "actors to end", PATIENCE)
        for path in self.site.beats.iterdir():
            path.unlink()


def instances(site: Site) -> dict[str, list[tuple[str, str, int]]]:
    """The ids, hosts and pids of living actors, by name."""
    return {
        name: [(life.actor, life.host, life.pid) for life in found] for name, found in site.living().items()
    }  # fmt: skip


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def test_one_of_three_etcds_is_killed_and_then_the_head(kept: Kept) -> None:
    with kept.lent() as site, site.program(site.c) as program:
        loaded = Loaded(site, program)
        site.kill_etcd(0)
        loaded.spawns("after-etcd")
        loaded.goes_on()
        assert loaded.is_led_by(loaded.leads)
        took_over = site.log(loaded.stands_by).count("took over cluster ")
        kill(site.head_pid(loaded.leads))
        site.said(loaded.stands_by, "took over cluster ", took_over + 1, BACK)
        loaded.spawns("after-head", BACK)
        loaded.goes_on()
        assert loaded.is_led_by(loaded.stands_by)
        loaded.end()
        site.start_etcd(0)
        site.start(loaded.leads, head=True)


def test_etcd_is_away(kept: Kept) -> None:
    with kept.lent() as site, site.program(site.c) as program:
        loaded = Loaded(site, program)
        before = instances(site)
        begun = time.monotonic()
        site.kill_etcd(0, 1, 2)
        refused = until(lambda: program.ask("refused", name="early"), "a spawn that is refused", PATIENCE)
        assert refused.startswith("HeadUnavailable") and site.url in refused, refused
        loaded.goes_on()
        assert program.ask("leader")["state"] == "adrift"
        until(lambda: time.monotonic() >= begun + AWAY, "the end of the time", PATIENCE)
        loaded.goes_on()
        site.start_etcd(0, 1, 2)
        loaded.spawns("afterwards", BACK)
        assert program.ask("leader")["state"] == "leading"
        after = instances(site)
        assert {name: after[name] for name in before} == before
        loaded.end()


def test_a_head_that_is_stopped_carries_nothing_out_afterwards(kept: Kept) -> None:
    with kept.lent() as site, site.program(site.c) as program:
        loaded = Loaded(site, program)
        took_over = site.log(loaded.stands_by).count("took over cluster ")
        stopped = site.head_pid(loaded.leads)
        os.kill(stopped, signal.SIGSTOP)
        begun = time.monotonic()
        loaded.spawns("meanwhile")  # the stopped head has this request, too
        site.said(loaded.stands_by, "took over cluster ", took_over + 1, LEADS)
        loaded.goes_on()
        until(lambda: time.monotonic() >= begun + AWAY, "the end of the time", PATIENCE)
        os.kill(stopped, signal.SIGCONT)
        site.said(loaded.leads, "this head decides no more")
        with site.program(site.d, f"{loaded.leads.address}:7433") as other:
            assert other.ask("leader")["address"].startswith(loaded.stands_by.address)
            assert other.ask("names") == sorted(loaded.names)
            assert other.ask("found", name=loaded.names[-1])[2] == 2
        loaded.goes_on()
        loaded.end()


@contextlib.contextmanager
def silent(host: Host, *others: Host) -> Iterator[None]:
    """Lose all packets between a host and others, both ways."""
    with ExitStack() as stack:
        for other in others:
            stack.enter_context(host.dropping("in", other=other))
            stack.enter_context(host.dropping("out", other=other))
        yield


def test_a_head_that_is_cut_off_from_etcd_alone(kept: Kept) -> None:
    """Another head leads, and no call fails, because all hosts but etcd's reach each other."""
    with kept.lent() as site, site.program(site.c) as program:
        loaded = Loaded(site, program)
        before = instances(site)
        took_over = site.log(loaded.stands_by).count("took over cluster ")
        with site.program(loaded.leads, f"{loaded.leads.address}:7433") as beside, silent(loaded.leads, site.e):
            name, both = loaded.add("contested"), (program, beside)
            contested = [each.send("refused", name=name) for each in both]
            site.said(loaded.stands_by, "took over cluster ", took_over + 1)
            loaded.spawns("meanwhile")
            loaded.goes_on()
            check_contest([each.answer(number, PATIENCE) for each, number in zip(both, contested, strict=True)])
            assert beside.ask("leader")["address"].startswith(loaded.stands_by.address)
            loaded.check()
        after = instances(site)
        assert {name: after[name] for name in before} == before
        loaded.goes_on()
        loaded.end()


def check_contest(refusals: list[str]) -> None:
    """Check that one of two spawns with the same name has succeeded, and that the other was told that it is taken."""
    assert refusals.count("") == 1, refusals
    assert any(refusal.startswith("NameTaken") for refusal in refusals), refusals


def test_a_head_that_is_cut_off_from_half_of_the_nodes(kept: Kept) -> None:
    """The head goes on. The nodes that it does not reach end, and their actors start again elsewhere after that."""
    with kept.lent() as site, site.program(site.c) as program:
        loaded = Loaded(site, program)
        far = loaded.stands_by, site.d
        before = {host.name: ends(site, host) for host in far}
        with silent(loaded.leads, *far):
            for host in far:
                until(lambda: ends(site, host) > before[host.name], f"the end of node {host.name}", PATIENCE)  # noqa: B023
            moved(loaded, far)
            loaded.spawns("meanwhile")
            assert loaded.is_led_by(loaded.leads)
            loaded.check()
        loaded.check()
        site.join(*far)
        loaded.end(far)


def ends(site: Site, host: Host) -> int:
    """The times that nodes of a host have said that they end without a head. The fence and the patience are over at
    about the same time, and either may be first."""
    log = site.log(host)
    return log.count("this node may go on; it ends") + log.count("this node ends")


def moved(loaded: Loaded, hosts: Sequence[Host]) -> None:
    """Wait until the actors of nodes that are lost have begun again elsewhere, and all operations succeed."""
    lost = {"", *(host.name for host in hosts)}
    for host in hosts:
        name = loaded.on(host)
        until(partial(is_elsewhere, loaded.program, name, lost), f"actor {name} elsewhere", PATIENCE)
    loaded.goes_on()


def is_elsewhere(program: Program, name: str, lost: set[str]) -> bool:
    """Whether an actor is at a host that is not lost."""
    return program.ask("place", name=name) not in lost


CUTS: dict[str, Callable[[Host], contextlib.AbstractContextManager[None]]] = {
    "both ways": lambda host: host.down(),
    "it hears nothing": lambda host: host.dropping("in"),
}


@pytest.mark.parametrize("cut", list(CUTS.values()), ids=list(CUTS))
def test_a_head_that_is_cut_off_from_all(
    kept: Kept, cut: Callable[[Host], contextlib.AbstractContextManager[None]]
) -> None:
    """The standby leads once the nodes have gone over to it. The node beside the head that is cut off ends."""
    with kept.lent() as site, site.program(site.c) as program:
        loaded = Loaded(site, program)
        took_over = site.log(loaded.stands_by).count("took over cluster ")
        decided = site.log(loaded.leads).count("this head decides no more")
        with site.program(loaded.leads, f"{loaded.leads.address}:7433") as beside, ExitStack() as stack:
            stack.enter_context(cut(loaded.leads))
            name = loaded.add("contested")
            contested = beside.send("refused", name=name)
            assert program.answer(program.send("refused", name=name), PATIENCE) == ""
            site.said(loaded.stands_by, "took over cluster ", took_over + 1)
            moved(loaded, [loaded.leads])
            assert loaded.is_led_by(loaded.stands_by)
            loaded.check()
            stack.pop_all().close()  # all hosts reach each other again
            site.said(loaded.leads, "this head decides no more", decided + 1)
            refusal = beside.answer(contested, PATIENCE)
            assert refusal, "two actors with one name"
        loaded.check()
        with site.program(site.d, f"{loaded.leads.address}:7433") as other:
            assert other.ask("names") == sorted(loaded.names)
        site.join(loaded.leads)
        loaded.end([loaded.leads])
