"""``zcactor demo``: the size that it takes, the table that it prints, and the end of all that it starts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from zcactor.cli import demo_ways
from zcactor.cli.demo import DEFAULT, LEAST, Figures, Refused, Room, choose, report
from zcactor.cli.demo_ways import SHARED, WAYS
from zcactor.sizes import size
from zcactor.testing import until

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
LARGE = Room(free=64 << 30, shared=32 << 30, workers=2, joblib=True)
WITHOUT = "import runpy, sys; sys.modules[{!r}] = None; runpy.run_module('zcactor', run_name='__main__')"


def test_the_size_is_that_asked_for_or_one_for_which_there_is_room() -> None:
    assert choose(None, LARGE) == DEFAULT
    assert choose(300 * MIB, LARGE) == 300 * MIB
    assert choose(None, replace(LARGE, free=LARGE.copies * 50 * MIB)) == 50 * MIB
    assert choose(None, replace(LARGE, shared=40 * MIB)) == 39 * MIB
    assert choose(300 * MIB, replace(LARGE, shared=40 * MIB, joblib=False)) == 300 * MIB


@pytest.mark.parametrize(
    ("asked", "room", "why"),
    [
        (300 * MIB, replace(LARGE, shared=64 * MIB), "joblib puts a frame of 300 MiB into /dev/shm, which has 64 MiB"),
        (None, replace(LARGE, shared=8 * MIB), "/dev/shm, which has 8 MiB free"),
        (None, replace(LARGE, shared=0, joblib=False), "/dev/shm is not there or full"),
        (1 << 40, replace(LARGE, joblib=False), "a frame of 1 TiB needs"),
        (None, replace(LARGE, free=20 * MIB), "the least frame is 16 MiB"),
        (LEAST - 1, LARGE, "the least is 16 MiB"),
    ],
)
def test_what_does_not_fit_is_refused(asked: int | None, room: Room, why: str) -> None:
    with pytest.raises(Refused, match=re.escape(why)):
        choose(asked, room)


def test_a_refusal_names_a_size_that_is_taken() -> None:
    room = replace(LARGE, shared=64 * MIB)
    with pytest.raises(Refused) as refused:
        choose(300 * MIB, room)
    found = re.search(r"try --size (\S+)", str(refused.value))
    assert found is not None
    assert choose(size(found[1]), room) == 63 * MIB


@pytest.mark.parametrize("copied", [None, 0, 987_654_321_098])
def test_the_table_fits_80_columns_and_names_the_fastest(copied: int | None) -> None:
    figures = Figures(12.3, 456.7, copied, copied, [1.0])
    found = dict.fromkeys(WAYS, figures) | {"joblib": Figures(0.2, 0.3, 1, 1, [1.0])}
    lines = list(report(512 << 30, 4, found))
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("From the frame to all results, joblib is the fastest") for line in lines)
    assert lines[-1].split()[:2] == ["469.00", "s"]


def test_workers_load_neither_the_library_nor_the_command_line() -> None:
    program = (
        "import runpy, sys\n"
        "runpy.run_path(sys.argv[1], run_name='__mp_main__')\n"
        "assert not {'zcactor', 'numpy'} & set(sys.modules), sys.modules"
    )
    subprocess.run([sys.executable, "-P", "-c", program, demo_ways.__file__], check=True)


@dataclass
class Demo:
    """A demo of this machine, in a process and a terminal's group of its own."""

    process: subprocess.Popen[str]
    mark: str

    def until_way(self, way: str) -> None:
        """Wait until it goes that way."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if f"{way}, with a frame of 16 MiB" in line:
                return
        raise AssertionError(f"it has ended before {way}")

    def left(self) -> list[str]:
        """The processes that it has started and that live, and its files."""
        found = [str(path) for path in SHARED.glob("zc-demo-*")]
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if self.mark.encode() in path.read_bytes():
                    found.append((path.parent / "cmdline").read_text().replace("\0", " "))
            except OSError:  # it has ended, or is another user's
                continue
        return found


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    """A demo with a small frame."""
    mark = uuid.uuid4().hex
    # A test run in the background ignores the signal, and so would its children.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [sys.executable, "-m", "zcactor", "demo", "--size", "16MiB"], cwd=tmp_path, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": str(tmp_path), "MARK_OF_DEMO": mark},
    )  # fmt: skip
    signal.signal(signal.SIGINT, before)
    with process:
        yield Demo(process, mark)
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["multiprocessing, by initializer", "joblib", "zcactor"])
async def test_ctrl_c_leaves_nothing_behind(demo: Demo, way: str) -> None:
    if way == "joblib":
        pytest.importorskip("joblib")
    demo.until_way(way)
    os.killpg(demo.process.pid, signal.SIGINT)
    out, _ = demo.process.communicate(timeout=30)
    assert (demo.process.returncode, out) == (130, "")
    await until(lambda: not demo.left(), "all that it has started has ended", 30)


@pytest.mark.slow
async def test_a_killed_demo_leaves_nothing_behind(demo: Demo) -> None:
    demo.until_way("multiprocessing, as argument")
    demo.process.kill()
    await until(lambda: not demo.left(), "all that it has started has ended", 30)


def run(here: Path, *start: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the demo with a small frame."""
    return subprocess.run(
        [sys.executable, *start, "demo", "--size", "16MiB"], cwd=here, check=False, capture_output=True, text=True,
        timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": str(here), **environ},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["click", "joblib"])
def test_it_runs_without_packages_that_are_not_the_wheels_own(tmp_path: Path, missing: str) -> None:
    done = run(tmp_path, "-c", WITHOUT.format(missing))
    assert done.returncode == 0, done.stderr
    assert "A frame of 16 MiB" in done.stdout
    assert re.search(r"^zcactor +[\d.]+ s +[\d.]+ s +[\d.]+ (bytes|KiB) +[\d.]+ MiB$", done.stdout, re.MULTILINE)
    assert "zcactor, with a frame of 16 MiB ..." in done.stderr
    assert ("joblib is not installed, and left out" in done.stderr) == (missing == "joblib")


@pytest.mark.slow
def test_a_cluster_in_the_settings_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "-m", "zcactor", ZCACTOR_ADDRESS="10.1.2.3:7433")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("zcactor: ZCACTOR_ADDRESS says address = '10.1.2.3:7433'")
