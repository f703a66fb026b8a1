"""`zcactor.machine`: quotas of control groups in both versions, and the processors that are left."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from tests.objectstore.faked_groups import process_in
from zcactor import machine
from zcactor.machine import cpu_quota, group_folders, usable_cpus
from zcactor.workers.run_directory import RunDirectory

PERIOD = 100_000
versions = pytest.mark.parametrize("version", [1, 2])


def process_with(base: Path, quotas: dict[str, float | None], version: int) -> Path:
    """Write groups with these quotas, by path, None for no quota; the process is in the last one. Returns its folder
    as in proc(5)."""
    mount = base / "a mount"
    for path, quota in quotas.items():
        folder = mount / path
        folder.mkdir(parents=True, exist_ok=True)
        number = None if quota is None else str(int(quota * PERIOD))
        if version == 2:
            (folder / "cpu.max").write_text(f"{number or 'max'} {PERIOD}\n")
        else:
            (folder / "cpu.cfs_quota_us").write_text(f"{number or -1}\n")
            (folder / "cpu.cfs_period_us").write_text(f"{PERIOD}\n")
    return process_in(base, mount, f"/{list(quotas)[-1]}", "cpu,cpuacct", version)


@versions
@pytest.mark.parametrize(
    ("quotas", "least"),
    [
        ({"a": None}, None),
        ({"a": 0.5}, 0.5),
        ({"a": 2.0}, 2.0),
        ({"a": None, "a/b": 1.5}, 1.5),
        ({"a": 0.25, "a/b": 4.0}, 0.25),
        ({"a": 3.0, "a/b": None, "a/b/c": None}, 3.0),
    ],
)
def test_the_least_quota_of_a_group_and_its_parents_counts(
    tmp_path: Path, version: int, quotas: dict[str, float | None], least: float | None
) -> None:
    assert cpu_quota(process_with(tmp_path, quotas, version)) == least


def test_no_group_sets_a_quota_where_there_are_no_files(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None
    proc = process_with(tmp_path, {"a": 1.0}, 1)
    (tmp_path / "a mount" / "a" / "cpu.cfs_period_us").unlink()  # as the group goes
    assert cpu_quota(proc) is None
    assert group_folders("cpu", proc)[0] == (tmp_path / "a mount" / "a", False)
    assert [unified for _, unified in group_folders("blkio", proc)] == [True]


@pytest.mark.parametrize(
    ("quota", "cpus"), [(None, 4), (0.01, 1), (0.5, 1), (1.0, 1), (1.01, 2), (3.5, 4), (4.0, 4), (64.0, 4)]
)
def test_usable_processors_are_the_quotas_rounded_up(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, cpus: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(machine, "_own_quota", lambda: quota)
    assert usable_cpus() == cpus


def test_no_other_module_counts_processors() -> None:
    package = Path(machine.__file__).parent
    counting = [
        path.relative_to(package).name
        for path in package.rglob("*.py")
        if "sched_getaffinity" in (text := path.read_text()) or "cpu_count" in text
    ]
    assert counting == ["machine.py"]


def test_this_machine_lacks_nothing() -> None:
    assert machine.missing_calls() == []
    machine.check_calls()
    machine.check_calls()


def test_a_file_system_without_locks_is_named_and_nothing_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused(fd: int, how: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(fcntl, "flock", refused)
    sentence = (
        r"/lock cannot be locked by flock\(2\): Operation not supported.* set XDG_RUNTIME_DIR to a folder of yours"
    )
    with pytest.raises(machine.CallMissing, match=sentence):
        RunDirectory(tmp_path)
    with pytest.raises(machine.CallMissing, match=sentence):
        RunDirectory.shared(tmp_path, "0" * 32)
    assert list(tmp_path.iterdir()) == []
