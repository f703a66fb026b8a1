"""Resources and names: actors that reserve CPUs wait for their turn, and any actor finds a named actor by its name.

python examples/resources.py
"""

from __future__ import annotations

import asyncio

import zcactor as zc


@zc.actor
class Ledger:
    """An actor that all others share: it has a name, so its handle need not be passed to them."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    @zc.method
    async def write(self, line: str) -> int:
        """Write a line, and return the number of lines so far."""
        self.lines.append(line)
        return len(self.lines)

    @zc.method
    async def read(self) -> list[str]:
        """All lines."""
        return self.lines


@zc.actor(num_cpus=1)
class Job:
    """An actor that reserves one CPU for as long as it lives."""

    @zc.method
    async def work(self, number: int) -> int:
        """Compute a sum of squares, and note that in the ledger."""
        ledger: Ledger = await zc.get_actor("ledger")
        total = sum(i * i for i in range(number * 10_000))
        await ledger.write(f"job {number} ran, {(await zc.available_resources())['CPU']:g} CPUs were free")
        return total


async def run_job(number: int) -> int:
    """Spawn a job, which waits while no CPU is free; use it; let it go, which frees the CPU."""
    job = await Job.spawn()
    try:
        return await job.work(number)
    finally:
        await zc.stop(job)


async def main() -> None:
    """Run the whole program."""
    async with zc.init(num_cpus=2, resources={"license": 1}):
        print(f"resources: {await zc.cluster_resources()}")
        ledger = await Ledger.options(name="ledger").spawn()
        same = await Ledger.options(name="ledger", get_if_exists=True).spawn()
        print(f"the same actor: {same == ledger}")

        await asyncio.gather(*(run_job(number) for number in range(6)))  # two at a time: there are two CPUs
        lines = await ledger.read()
        print(*lines, sep="\n")

        try:
            await Job.options(num_cpus=64).spawn()
        except zc.InsufficientResources as error:
            print(f"never possible, so it does not wait: {error}")
        try:
            await Ledger.options(name="ledger").spawn()
        except zc.NameTaken as error:
            print(f"taken: {error}")


if __name__ == "__main__":
    zc.run(main())
