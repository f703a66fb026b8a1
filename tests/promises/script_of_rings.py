"""Functions of a script that name their actor's class again, beside a lock: each is printed as it is named."""

from __future__ import annotations

import threading
from typing import Any

import zcactor as zc

LOCK = threading.Lock()
spare = threading.Lock()


def helper() -> Any:
    """Names the class and then the lock."""
    return Direct, LOCK


class Direct:
    def get(self) -> Any:
        return helper()


def around() -> Any:
    """Names the class by way of another function, which leads nowhere else."""
    return onward(), LOCK


def onward() -> Any:
    """Names the class alone."""
    return Indirect


class Indirect:
    def get(self) -> Any:
        return around()


class Attribute:
    def get(self, other: Any) -> Any:
        return other.spare, LOCK


async def main() -> None:
    """Spawn an actor of each class, and print the reason why there is none."""
    async with zc.init(num_cpus=1):
        for cls in (Direct, Indirect, Attribute):
            try:
                await zc.spawn(cls)
            except TypeError as error:
                print(error)


if __name__ == "__main__":
    zc.run(main())
