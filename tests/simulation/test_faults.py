"""Each kind of fault by itself: it happens, is repaired, and breaks no invariant."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulation.run import Run
from simulation.schedule import KINDS, TAKE_OVER, Fault, draw

SEEN = {
    "kill": "worker killed", "agent": "agent killed", "off": "host off", "cut": "cut", "oneway": "cut one way",
    "stop": "worker stopped", "reset": "connection reset", "exit": "worker exited", "zygote": "zygote lost",
    "flap": "a way flaps", "part": "some hosts cut off", "swizzle": "swizzled", "handshake": "handshakes lost",
    "full": "no room in a store", "jump": "a clock jumps", "restart": "head killed",
    "silence": "the head's log is silent",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.3, 9.0])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "head"])  # which ends the cluster: see `test_run`
def test_one_kind(kind: str, seconds: float) -> None:
    who = ("h0", "h1") if kind in ("cut", "oneway", "flap", "reset", "slow", "swizzle") else ("h1",)
    workloads: tuple[str, ...] = ("calls",)
    if kind in ("restart", "silence", "failpoint"):
        who, workloads = ("h0",), ("calls", TAKE_OVER)
    faults = (Fault(1.0, kind, who, seconds, 1), Fault(2.0, kind, who, seconds, 2))
    run = Run(replace(draw(2, 3, 4.0, workloads, workloads), faults=faults))
    assert run.play(), [broken.plain() for broken in run.record.broken]
    assert run.faults.done == list(faults)
    assert SEEN.get(kind) in (None, *run.record.sometimes)
    network = run.network
    assert not any((network.slow, network.refusing, network.losing, network._cut, network._off))
