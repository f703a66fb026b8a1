"""Supervision: an actor that dies is started again, and the error of a lost call says whether the call may have run.

python examples/supervision.py
"""

from __future__ import annotations

import os
import signal

import zcactor as zc


@zc.actor
class Counter:
    """A counter in memory; a restart begins again with `start`."""

    def __init__(self, start: int) -> None:
        self.count = start

    @zc.method
    def add(self, n: int) -> int:
        """Add `n`, and return the new count."""
        self.count += n
        return self.count

    @zc.method(idempotent=True, retries=3)
    def read(self) -> int:
        """The count. Running it twice is harmless, so the call is sent again when the actor is lost."""
        return self.count

    @zc.method
    def crash(self) -> None:
        """End the process by SIGKILL."""
        os.kill(os.getpid(), signal.SIGKILL)


async def main() -> None:
    """Run the whole program."""
    async with zc.init():
        counter = await Counter.options(max_restarts=1).spawn(10)
        print(f"count: {await counter.add(5)}")

        # The call was sent, then the process died: it may have run. So it is not sent again, which might run it twice.
        try:
            await counter.crash()
        except zc.ActorUnavailable as error:
            print(f"lost: {error.cause}; maybe_executed={error.maybe_executed}")

        # `read` waits for the restart. The constructor ran again with its first arguments: the state in memory is gone.
        print(f"after the restart: {await counter.read()}")
        restarts = [actor.restarts for actor in await zc.actors() if actor.class_name == "Counter"]
        print(f"restarts: {restarts}")

        # The second death is one too many: the actor is dead for good.
        try:
            await counter.crash()
        except zc.ActorDied as error:
            print(f"died: {error.cause}; maybe_executed={error.maybe_executed}")
        try:
            await counter.add(1)
        except zc.ActorDied as error:
            print(f"called when it was dead: maybe_executed={error.maybe_executed}")

        # An exception in a method is different: the caller gets it, with its own type, and the actor lives on.
        other = await Counter.spawn(0)
        try:
            await other.add("five")  # type: ignore[call-overload]
        except TypeError as error:
            print(
                f"raised in the actor: {type(error).__name__}, also a RemoteError: {isinstance(error, zc.RemoteError)}"
            )
        print(f"and it lives on: {await other.add(1)}")


if __name__ == "__main__":
    zc.run(main())
