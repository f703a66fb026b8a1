"""A program that joins a cluster and holds arrays there, as the driver and actors do: see `tests.test_memory`.

Run as ``python -m tests.memory_program ADDRESS``, it reads one call a line and answers each by a line.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import zcactor as zc
from tests.memory_holders import ASYNC, Holder

__all__ = ["CAPACITY", "Joined"]

ROOT = Path(__file__).resolve().parents[1]
CAPACITY = 1 << 28
"""Bytes of each process's arena in the cluster."""


class Joined:
    """Such a program, as the test sees it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, address: str) -> Self:
        """Start the program, with the environment of this process."""
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.memory_program", address,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ,
        )  # fmt: skip
        return cls(process)

    async def call(self, method: str, *arguments: Any) -> Any:
        """Run a method of the program's `Holder`; an actor is given as `{"actor": name}`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([method, *arguments]).encode() + b"\n")
        line = await self._process.stdout.readline()
        assert line, f"the program ended in {method}{arguments}"
        return json.loads(line)

    async def stop(self) -> None:
        """Let the program leave the cluster in order."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert await self._process.wait() == 0

    async def kill(self) -> None:
        """Kill the program."""
        self._process.kill()
        await self._process.wait()


async def main(address: str) -> None:
    """Join, and run calls until the input ends."""
    holder = Holder()
    async with zc.init(address, store_capacity=CAPACITY, log_to_driver=False):
        while line := await asyncio.to_thread(sys.stdin.readline):
            method, *given = json.loads(line)
            arguments = [await zc.get_actor(one["actor"]) if isinstance(one, dict) else one for one in given]
            result = getattr(holder, method)(*arguments)
            print(json.dumps(await result if method in ASYNC else result), flush=True)


if __name__ == "__main__":
    zc.run(main(sys.argv[1]))
