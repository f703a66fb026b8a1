"""Queue pairs are destroyed when all their requests have come back, and not before."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from zcactor.transport.verbs.peer.connection import MARK, Takedown


class Bench:
    """Two queue pairs that record calls."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.reported: list[Exception] = []
        self.close_fails: OSError | None = None
        self.puller = SimpleNamespace(drained=False, stuck=False, destroyed=lambda: self.done.append("destroyed"))
        self.control = SimpleNamespace(to_error=lambda: self.done.append("error"), post_sends=self.done.extend)
        area = SimpleNamespace(address=lambda _: 0x1000, lkey=5)
        pairs: Any = SimpleNamespace(control=self.control, send_area=area, close=self._close)
        engine: Any = SimpleNamespace(usable=True, device=SimpleNamespace(name="fake0"))
        self.engine = engine
        self.takedown = Takedown(pairs, engine, asyncio.get_running_loop(), self.reported.append)
        bulk: Any = SimpleNamespace(puller=self.puller, end=lambda: self.done.append("bulk"))
        self.takedown.bulk = bulk

    def _close(self) -> None:
        if self.close_fails is not None:
            raise self.close_fails
        self.done.append("closed")


async def test_both_have_to_be_empty() -> None:
    bench = Bench()
    bench.takedown.fence_bulk()
    bench.takedown.fence_control()
    bench.takedown.fence_control()
    bulk, error, mark = bench.done
    assert (bulk, error, mark.wr_id, mark.nbytes) == ("bulk", "error", MARK, 0)
    await asyncio.sleep(0)
    bench.puller.drained = True
    bench.takedown.look()
    assert len(bench.done) == 3, "the mark has not come back"
    bench.takedown.drained()
    bench.puller.drained = False
    bench.takedown.look()
    assert len(bench.done) == 3, "READs are under way"
    bench.puller.drained = True
    bench.takedown.look()
    assert bench.done[3:] == ["closed", "destroyed"]


@pytest.mark.parametrize("usable", [True, False])
async def test_what_never_comes_back(usable: bool) -> None:
    bench = Bench()

    def fails(*_: object) -> None:
        raise OSError("no device")

    bench.control.to_error = fails
    bench.takedown.bulk.end = fails  # type: ignore[method-assign]
    bench.engine.usable = usable
    bench.takedown.fence_bulk()
    assert bench.puller.stuck
    bench.takedown.fence_control()
    await asyncio.sleep(0)
    assert len(bench.reported) == 2
    assert bench.done == (["closed", "destroyed"] if usable else []), "a device that has failed may still write"


async def test_what_cannot_be_destroyed_stays(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.puller.drained = True
    bench.close_fails = OSError("busy")
    bench.takedown.drained()
    bench.takedown.look()
    assert bench.done == [] and "stays with fake0: busy" in caplog.text
