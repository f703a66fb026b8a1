"""A group over four hosts next to bare sockets: namespaces on one machine, with a rank on each.

::

    python -m benchmarks.group_hosts            # needs root, iproute2 and nftables
    python -m benchmarks.group_hosts --quick

A `reduce_scatter` brings each rank the fourth part of the arrays of all others, and adds. The floor is the exchange
alone: each rank gets the same parts from each of the others at once, by sendfile(2) from a memfd to recv(2) into memory
that it has already touched. Both begin after a barrier, and the slowest rank counts. Neither side's bytes are sealed.
Both take turns, and the round of the median ratio counts.

All hosts are processes of this machine, whose cores do the work of all: ratios are of use, times are not.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import zcactor as zc
from benchmarks.harness import Measurement, Scale, at_least, exactly, interleave, median_round, show
from benchmarks.program import options_of, report
from tests.hosts.netns import Network, missing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.hosts.netns import Host

__all__ = ["main"]

MIB: Final = 1 << 20
HOSTS: Final = 4
SIZES = (16, 64)
"""MiB of each rank's input."""
SHARE: Final = 0.85
"""Budget: of the rate of bare sockets."""
ENVIRONMENT: Final = {
    "ZCACTOR_TOKEN": "5a" * 32, "ZCACTOR_SEALING": "off", "ZCACTOR_INTEGRITY": "frames",
    "ZCACTOR_STORE_CAPACITY": str(1 << 30),
}  # fmt: skip
PATIENCE: Final = 300.0
"""Seconds that all measurements of one size may take."""

ROUNDS: Final = 3
"""Rounds of each run."""
FULL, QUICK = Scale(9, 1.0), Scale(5, 0.25)


def _serve(sock: socket.socket, memory: int) -> None:
    """Answer each request, two numbers, by the bytes of the memfd from the first on to the second."""
    with sock:
        while request := sock.recv(16, socket.MSG_WAITALL):
            at, end = int.from_bytes(request[:8], "little"), int.from_bytes(request[8:], "little")
            while at < end:
                at += os.sendfile(sock.fileno(), memory, at, end - at)


def _receive(sock: socket.socket, start: int, view: memoryview) -> None:
    sock.sendall(start.to_bytes(8, "little") + (start + len(view)).to_bytes(8, "little"))
    at = 0
    while at < len(view):
        at += sock.recv_into(view[at:], len(view) - at, socket.MSG_WAITALL)


@zc.actor
class Rank:
    """A member of the group, and beside it the sockets of the floor."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.inputs: dict[int, Any] = {}

    @zc.method
    async def listen(self, nbytes: int) -> tuple[str, int]:
        """Serve so many bytes to each client. Returns the address."""
        memory = os.memfd_create("floor")
        os.posix_fallocate(memory, 0, nbytes)
        listening = socket.create_server((self.address, 0))

        def accept() -> None:
            while True:
                sock, _ = listening.accept()
                threading.Thread(target=_serve, args=(sock, memory), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        return self.address, listening.getsockname()[1]

    @zc.method
    async def meet(self, others: list[tuple[str, int]], nbytes: int) -> None:
        """Connect to the others, each of which gives so many bytes at most."""
        self.threads = ThreadPoolExecutor(len(others))
        self.sockets = [socket.create_connection((host, port)) for host, port in others]
        self.bare = [memoryview(mmap.mmap(-1, nbytes)) for _ in others]
        for view in self.bare:
            view[:] = bytes(len(view))

    @zc.method
    async def exchanges(self, group: zc.Group, nbytes: int, count: int) -> float:
        """Seconds of taking a part of so many bytes in all from each of the others."""
        loop, part = asyncio.get_running_loop(), nbytes // group.size
        start = group.rank * part  # each takes bytes of its own, as in a reduce_scatter
        taken = [(sock, start, view[:part]) for sock, view in zip(self.sockets, self.bare, strict=True)]
        times = []
        for _ in range(count):
            await group.barrier()
            before = time.perf_counter()
            await asyncio.gather(*[loop.run_in_executor(self.threads, _receive, *each) for each in taken])
            times.append(time.perf_counter() - before)
        return median(times)

    @zc.method
    async def scatters(self, group: zc.Group, nbytes: int, count: int) -> float:
        """Seconds of a reduce_scatter of an array of the store."""
        array = self.inputs.get(nbytes)
        if array is None:
            array = self.inputs[nbytes] = zc.ones(nbytes // 4, np.float32)
        times = []
        for _ in range(count):
            await group.barrier()
            before = time.perf_counter()
            piece = await group.reduce_scatter(array)
            times.append(time.perf_counter() - before)
            if piece[0] != group.size or piece[-1] != group.size:
                raise RuntimeError(f"a sum of ones over {group.size} ranks is {piece[0]}, {piece[-1]}")
            del piece
        return median(times)


async def _slowest(actors: Sequence[Any], method: str, *args: Any) -> float:
    return max([float(each) for each in await zc.get([getattr(actor, method)(*args) for actor in actors])])


async def drive(head: str, sizes: Sequence[int], runs: int, share: float) -> None:
    """Be the program that measures: print for each size the MiB, the seconds of the floor and of ours, and the bytes
    that were copied."""
    async with zc.init(head):
        nodes = {node.host: node for node in await zc.nodes()}
        actors: list[Any] = []
        for node in nodes.values():
            address = node.address.rpartition("@")[2].rpartition(":")[0]
            actors.append(await Rank.options(node=node.node_id, num_cpus=0).spawn(address))
        group = await zc.group(actors)
        most = max(sizes) * MIB // HOSTS
        places = await zc.get([actor.listen(max(sizes) * MIB) for actor in actors])
        for rank, actor in enumerate(actors):
            await actor.meet([place for other, place in enumerate(places) if other != rank], most)
        for mib in sizes:
            count = Scale(runs, share).count(256 // mib, least=2)
            before = [(await zc.stats(actor)).bytes_copied for actor in actors]
            subjects: dict[str, Any] = {
                "bare": partial(_slowest, actors, "exchanges", group, mib * MIB, count),
                "ours": partial(_slowest, actors, "scatters", group, mib * MIB, count),
            }
            times = await interleave(ROUNDS * runs, subjects)
            copied = sum([(await zc.stats(actor)).bytes_copied for actor in actors]) - sum(before)
            ours, bare = median_round(times["ours"], times["bare"])
            print(json.dumps([mib, bare, ours, copied]), flush=True)


def _start(host: Host, *arguments: str) -> None:
    line = (sys.executable, "-m", "zcactor", "start", *arguments, "--num-cpus", "2")
    with host.start(*line, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        output, _ = process.communicate(timeout=60)
    if process.returncode:
        raise RuntimeError(f"no node starts on {host.name}: {output}")


def measure(scale: Scale) -> list[Measurement]:
    """Make the hosts, and measure the group on them."""
    found: list[Measurement] = []
    with ExitStack() as stack:
        hosts = stack.enter_context(Network(HOSTS))
        head = f"{hosts[0].address}:7433"
        for host in hosts:
            _start(host, *(["--head", "--host", host.address] if host is hosts[0] else ["--address", head]))
        line = (sys.executable, "-m", "benchmarks.group_hosts", "drive", head, str(scale.runs), str(scale.share))
        sizes = [str(mib) for mib in SIZES]
        with hosts[0].start(*line, *sizes, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
            output, _ = process.communicate(timeout=PATIENCE)
        if process.returncode:
            raise RuntimeError(f"the program that measures ended with {process.returncode}")
    for mib, bare, ours, copied in map(json.loads, output.splitlines()):
        moved = mib * (HOSTS - 1) / HOSTS  # MiB that a rank takes
        found.append(
            Measurement("group-hosts", f"reduce_scatter of {mib} MiB over {HOSTS} hosts", moved / ours, "MiB/s",
                        moved / bare, "sendfile to recv", at_least(SHARE), ROUNDS * scale.runs,
                        "round of the median ratio")
        )  # fmt: skip
        found.append(Measurement("group-hosts", f"bytes copied for {mib} MiB", copied, "B", budget=exactly(0)))
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measure and show.

    Returns:
        0; 1 with ``--strict`` when a budget does not hold; 2 where hosts cannot be made.
    """
    options = options_of("benchmarks.group_hosts", "A group over four hosts, next to sockets.").parse_args(arguments)
    reason = missing()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    found = measure(QUICK if options.quick else FULL)
    show("A group over four hosts", found)
    return report(options, found)


if __name__ == "__main__":
    if sys.argv[1:2] == ["drive"]:
        zc.run(drive(sys.argv[2], [int(mib) for mib in sys.argv[5:]], int(sys.argv[3]), float(sys.argv[4])))
    else:
        sys.exit(main())
