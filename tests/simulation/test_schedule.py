"""The schedule of a seed, and its file; `tests.simulation.test_command` has files that cannot be played."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from simulation.schedule import KINDS, TAKE_OVER, BadSchedule, Fault, Schedule, draw

KNOWN = ("calls", "streams")


def test_a_seed_is_one_schedule() -> None:
    assert draw(5, 6, 30.0, (), KNOWN) == draw(5, 6, 30.0, (), KNOWN)
    drawn = [draw(seed, 6, 30.0, (), KNOWN) for seed in range(300)]
    assert {schedule.workloads for schedule in drawn} == {("calls",), ("streams",), ("calls", "streams")}
    heads = [draw(seed, 6, 30.0, (), (*KNOWN, TAKE_OVER)) for seed in range(300)]
    given = [draw(seed, 6, 30.0, (TAKE_OVER,), (TAKE_OVER,)) for seed in range(9)]
    assert {fault.kind for schedule in (*drawn, *heads, *given) for fault in schedule.faults} == set(KINDS)
    for schedule, head in zip(drawn, heads, strict=True):
        taken = TAKE_OVER in head.workloads
        assert head.workloads == (*schedule.workloads, *[TAKE_OVER] * taken), "the other draws stay"
        assert taken or head == schedule
        assert not taken or not any(fault.kind == "head" for fault in schedule.faults)
    assert 20 < sum(TAKE_OVER in schedule.workloads for schedule in heads) < 60
    assert TAKE_OVER not in draw(heads[0].seed, 1000, 30.0, (), (*KNOWN, TAKE_OVER)).workloads
    assert any(len({fault.kind for fault in schedule.faults}) < 3 for schedule in drawn)
    assert [schedule.seed for schedule in drawn if schedule.wire == "native"] == list(range(0, 300, 10))
    assert {draw(seed, 6, 30.0, (), KNOWN, "python").wire for seed in (10, 11)} == {"python"}
    assert {draw(seed, 6, 30.0, (), KNOWN, "native").wire for seed in (10, 11)} == {"native"}
    for schedule in drawn:
        assert schedule.config.recv_depth == schedule.settings["recv_depth"]
        assert all(0 <= fault.at < 30 for fault in schedule.faults)
        assert not any(fault.who[0] == "h0" for fault in schedule.faults if fault.kind in ("agent", "off"))


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_few_nodes_have_the_faults_that_they_can_have(nodes: int) -> None:
    for seed in range(100):
        for fault in draw(seed, nodes, 30.0, KNOWN, KNOWN).faults:
            assert all(int(host[1:]) < nodes for host in fault.who)


def test_a_file_is_the_schedule(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    for seed in range(50):
        schedule = draw(seed, 6, 30.0, (), KNOWN)
        path.write_text(schedule.text())
        assert Schedule.read(path, KNOWN) == schedule
    with pytest.raises(BadSchedule, match="streams"):
        path.write_text(replace(schedule, workloads=("streams",)).text())
        Schedule.read(path, ("calls",))
    with pytest.raises(BadSchedule, match="at of a fault is -1"):
        path.write_text(replace(schedule, faults=(Fault(-1, "kill", ("h1",)),)).text())
        Schedule.read(path, KNOWN)
    with pytest.raises(BadSchedule, match="with the workload 'head'"):
        path.write_text(replace(schedule, faults=(Fault(1, "restart", ("h0",)),)).text())
        Schedule.read(path, KNOWN)
