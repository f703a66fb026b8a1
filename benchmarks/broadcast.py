"""One array to eight hosts at once: the bytes that leave its owner, and the time; namespaces on one machine.

::

    python -m benchmarks.broadcast            # needs root, iproute2 and nftables
    python -m benchmarks.broadcast --quick

The floor of the time is one pull by one host from the owner, in the same run over the same links. For comparison all
hosts also take the array from its owner, as they would if no host passed it on. Links without a limit are bounded by
this machine's cores, which then do the work of all hosts; where each host may send only 1 Gbit/s, the links are the
bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import uvloop

import zcactor as zc
from benchmarks.harness import Measurement, Scale, at_most, exactly, medians, show
from benchmarks.program import options_of, report
from tests.hosts.members import Member
from tests.hosts.netns import Network, missing
from zcactor.api.handle import ActorHandle
from zcactor.api.remote_actor import RemoteActor
from zcactor.ids import new_actor
from zcactor.interface import Interface
from zcactor.objects import locations
from zcactor.observe.stats import stats_of
from zcactor.transport.tcp.serve import DataServer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.hosts.netns import Host, Program
    from zcactor.transport.tcp.data import Channel

__all__ = ["main"]

MIB: Final = 1 << 20
HOSTS = 8
SIZES = (256, 64)
"""MiB of the array: over links without a limit, and over slow links."""
TIMES_ARRAY: Final = 2
"""Budget of the bytes that leave the owner, in arrays."""
LINK: Final = "1gbit"
PATIENCE: Final = 120.0
"""Seconds that one broadcast may take."""

Array = npt.NDArray[np.float64]

FULL, QUICK = Scale(5, 1.0), Scale(1, 0.25)


# ---- the hosts


class Taker:
    """An actor that takes an array, and keeps it as a reader would."""

    def __init__(self) -> None:
        self.kept: Array | None = None

    async def take(self, array: Array) -> float:
        """A sum that touches each page."""
        self.kept = array
        return float(array[:: 4096 // 8].sum())


class End:
    """One of the processes. Its methods are commands."""

    def __init__(self, host: str, mib: int) -> None:
        self.member = Member(host, 3 * mib * MIB)
        self.member.be_current()
        self._takers: list[Any] = []
        self._taker = Taker()
        self._served: list[int] = []
        self._count()
        process = self.member.process
        self._index = process.hosts.take_index()
        process.hosts.add(self._index, Taker, "Taker").adopt(self._taker)

    def _count(self) -> None:
        served, answer = self._served, DataServer._answer

        def counting(self: DataServer, channel: Channel, arena: int, object_id: int, offset: int, nbytes: int) -> None:
            served.append(nbytes)
            answer(self, channel, arena, object_id, offset, nbytes)

        setattr(DataServer, "_answer", counting)  # noqa: B010  # here bytes leave, for any reader

    async def about(self) -> dict[str, Any]:
        """The name, address and actor of this process."""
        member = self.member
        return {"name": member.name.hex(), "address": member.endpoint.address, "index": self._index}

    async def meet(self, others: list[dict[str, Any]]) -> None:
        """Make the other processes known, and connect to each."""
        process = self.member.process
        for other in others:
            self.member.addresses[other["name"]] = other["address"]
            place = bytes.fromhex(other["name"]), other["index"]
            remote = RemoteActor(process, new_actor(), Interface.of(Taker), place, None, "default", 1000, 0)
            self._takers.append(ActorHandle(remote))
            await process.connections.connect(place[0])

    async def passed_on(self, wanted: bool) -> None:
        """Set whether this reader asks for the places of the array; otherwise it takes the array from its owner."""
        locations.LOCATED_NBYTES = 1 if wanted else 1 << 62  # type: ignore[misc]

    async def give(self, count: int, mib: int) -> dict[str, float]:
        """Give an array to so many of the others: the seconds until each has it, and the bytes that this process has
        sent."""
        array: Array = zc.empty(mib * MIB // 8)
        array[:] = 1
        self._served.clear()
        before = time.perf_counter()
        sums = await asyncio.gather(*(taker.take(array) for taker in self._takers[:count]))
        seconds = time.perf_counter() - before
        assert sums == [len(array[:: 4096 // 8])] * count
        return {"seconds": seconds, "bytes": sum(self._served)}

    async def drop(self) -> None:
        """Drop the kept array."""
        self._taker.kept = None

    async def stats(self) -> dict[str, Any]:
        """The figures of the process."""
        return stats_of(self.member.process).plain()


async def answer(host: str, mib: int) -> None:
    """Run the program of each process: execute the commands on the standard input."""
    end = End(host, mib)
    await end.member.start()
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command = json.loads(line)
        number, name = command.pop("id"), command.pop("do")
        print(json.dumps({"id": number, "value": await getattr(end, name)(**command)}), flush=True)


# ---- the measurements


@contextlib.contextmanager
def limited(hosts: Sequence[Host]) -> Iterator[None]:
    """Limit what each host sends to the rate `LINK`, with a bucket of 4 ms."""
    line = ("qdisc", "add", "dev", "eth0", "root", "tbf", "rate", LINK, "burst", "512kb", "latency", "50ms")
    for host in hosts:
        host.command("tc", *line)
    try:
        yield
    finally:
        for host in hosts:
            host.command("tc", "qdisc", "del", "dev", "eth0", "root")


def measure(scale: Scale) -> list[Measurement]:
    """Make the hosts, and measure everything between them."""
    found: list[Measurement] = []
    with Network(1 + HOSTS) as hosts, ExitStack() as stack:
        largest = str(max(SIZES))
        owner, *readers = (
            stack.enter_context(host.python("-m", "benchmarks.broadcast", "serve", host.address, largest))
            for host in hosts
        )
        about = [program.ask("about") for program in (owner, *readers)]
        for number, program in enumerate((owner, *readers)):
            program.ask("meet", others=about[:number] + about[number + 1 :])
        found += _rounds(owner, readers, SIZES[0], scale, f"{SIZES[0]} MiB to {HOSTS} hosts")
        with limited(hosts):
            found += _rounds(owner, readers, SIZES[1], scale, f"{SIZES[1]} MiB to {HOSTS} hosts, {LINK} each")
        copied = sum(program.ask("stats")["bytes_copied"] for program in (owner, *readers))
        found.append(Measurement("broadcast", "bytes copied", copied, "", budget=exactly(0)))
    return found


def _rounds(owner: Program, readers: Sequence[Program], mib: int, scale: Scale, name: str) -> list[Measurement]:
    seconds: dict[str, list[float]] = {"direct": [], "tree": [], "star": []}
    left: list[float] = []
    for turn in range(scale.runs + 1):
        for kind, figures in seconds.items():
            for reader in readers:
                reader.ask("passed_on", wanted=kind == "tree")
            told = owner.answer(owner.send("give", count=1 if kind == "direct" else len(readers), mib=mib), PATIENCE)
            for reader in readers:
                reader.ask("drop")
            if turn:  # the first one is for the memory's pages
                figures.append(told["seconds"])
                if kind == "tree":
                    left.append(told["bytes"] / (mib * MIB))
    taken = medians(seconds)
    return [
        Measurement(
            "broadcast", f"{name}: leaves the owner", max(left), "arrays", budget=at_most(TIMES_ARRAY, "value"),
            runs=scale.runs,
        ),
        Measurement(
            "broadcast", f"{name}: time", taken["tree"], "s", taken["direct"], "one direct pull", None, scale.runs
        ),
        Measurement(
            "broadcast", f"{name}: all from the owner", taken["star"], "s", taken["direct"], "one direct pull", None,
            scale.runs,
        ),
    ]  # fmt: skip


# ---- the program


def main(arguments: list[str] | None = None) -> int:
    """Measure and show.

    Returns:
        0; 1 with ``--strict`` when a budget does not hold; 2 where hosts cannot be made.
    """
    options = options_of("benchmarks.broadcast", "One array to many hosts.").parse_args(arguments)
    reason = missing()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    found = measure(QUICK if options.quick else FULL)
    show("One array to many hosts", found)
    return report(options, found)


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        uvloop.run(answer(sys.argv[2], int(sys.argv[3])))
    else:
        sys.exit(main())
