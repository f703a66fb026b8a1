"""``zcactor status``: programs with embedded nodes, what their actors do, and nobody else's sockets."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.driver.programs import Program, until
from zcactor.cli.status import actor_rows, doing, program_lines
from zcactor.execution.activity import ActorActivity, Running
from zcactor.node.reports import ActorReport, ProgramReport, programs_here
from zcactor.transport.local import unix
from zcactor.workers.run_directory import PREFIX

ROOT = Path(__file__).resolve().parents[2]
SOURCE = """
class Slow:
    def run(self, path): open(path).close()
    async def block(self, path): open(path).close()

async def main():
    async with zc.init(warn_after=0.2):
        busy = await zc.actor(Slow).options(name="busy").spawn()
        idle = await zc.actor(Slow).options(name="idle").spawn()
        stuck = await zc.actor(Slow).options(name="stuck").spawn()
        x = zc.freeze(np.ones(1 << 20))
        refs = [busy.run("{directory}/run") for _ in range(4)] + [stuck.block("{directory}/block")]
        tell(ready=os.getpid())
        await zc.get(refs)
zc.run(main())
"""


def zcactor(base: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a session whose run directories lie in `base`, at 80 columns."""
    own = {
        "PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(base), "XDG_STATE_HOME": str(base), "COLUMNS": "80",
        "XDG_CONFIG_HOME": str(base), "TMPDIR": str(base),
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "-m", "zcactor", *arguments], env={**os.environ, **own}, capture_output=True, text=True,
        check=False, timeout=60,
    )  # fmt: skip


@pytest.fixture
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for run directories, with a short path, as those of sockets have to be."""
    return tmp_path_factory.mktemp("s")


@pytest.fixture
def program(base: Path) -> Iterator[Program]:
    """A program with three actors: one runs a plain method, one nothing, and one blocks its loop."""
    for name in ("run", "block"):
        os.mkfifo(base / name)
    with Program(
        SOURCE.format(directory=base), env={"XDG_RUNTIME_DIR": str(base), "ZCACTOR_STORE_CAPACITY": str(1 << 28)}
    ) as started:
        started.told("ready")
        yield started


@pytest.mark.slow
def test_a_program_with_its_actors(base: Path, program: Program) -> None:
    def actors() -> dict[str, Any] | None:
        done = zcactor(base, "status", "--json")
        if done.returncode:
            return None
        (report,) = json.loads(done.stdout)["programs"]
        assert report["pid"] == program.pid
        assert report["resources"]["CPU"][0] >= 1
        assert report["store_used"] >= 8 << 20
        found = {actor["name"]: actor for actor in report["actors"]}
        busy = found["busy"]["activity"]
        seen = busy and busy["running"] and busy["running"][0]["seconds"] > 0.2 and busy["waiting"] == 3
        return found if seen and found["stuck"]["activity"] is None else None

    found: dict[str, Any] = until(actors, "a report of all three")
    assert found["busy"]["activity"]["running"][0]["method"] == "run"
    assert found["busy"]["activity"]["waited"] > 0
    assert found["idle"]["activity"]["running"] == []
    done = zcactor(base, "status")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert lines[0].startswith(f"program {program.pid}, ")
    assert any(line.startswith("Slow(busy)") and " run " in line and "3 for " in line for line in lines)
    assert any(line.startswith("Slow(idle)") and " idle " in line for line in lines)
    assert any(line.startswith("Slow(stuck)") and " does not answer" in line for line in lines)
    sockets = list(base.glob(f"{PREFIX}*/*.status"))
    assert [stat.S_IMODE(path.stat().st_mode) for path in sockets] == [0o600]
    writers = [os.open(base / name, os.O_RDWR) for name in ("run", "block")]  # all calls may open theirs now
    assert program.status() == 0
    for writer in writers:
        os.close(writer)
    assert not list(base.glob(f"{PREFIX}*"))


@pytest.mark.slow
def test_nothing_runs(base: Path) -> None:
    done = zcactor(base, "status")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no node of yours runs on this host; give --address HOST:PORT" in done.stderr


# ---------------------------------------------------------------- sockets of others


def listening(base: Path) -> tuple[socket.socket, Path]:
    """A socket with a report's name, in a run directory, and its path."""
    folder = base / f"{PREFIX}{'0' * 32}"
    folder.mkdir(mode=0o700)
    path = folder / f"{'0' * 32}.status"
    listener = unix.listen(path)
    path.chmod(0o600)
    return listener, path


@pytest.mark.parametrize(
    "spoil", ["folder open to others", "socket open to others", "file", "link", "garbage", "nested"]
)
async def test_sockets_that_are_not_private_are_not_looked_at(
    base: Path, monkeypatch: pytest.MonkeyPatch, spoil: str
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    monkeypatch.setattr(tempfile, "tempdir", str(base))  # programs of other tests have theirs elsewhere
    listener, path = listening(base)
    if spoil == "folder open to others":
        path.parent.chmod(0o755)
    elif spoil == "socket open to others":
        path.chmod(0o666)
    elif spoil == "file":
        path.unlink()
        path.write_bytes(b"{}")
    elif spoil == "link":
        path.rename(base / "elsewhere")
        path.symlink_to(base / "elsewhere")
    else:
        listener.setblocking(True)

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b'{"pid": "none"}' if spoil == "garbage" else b'{"x":' + b"[" * 100_000)

        thread = threading.Thread(target=answer)
        thread.start()
    try:
        assert await programs_here() == []
        if spoil in ("garbage", "nested"):
            thread.join(20)
        else:
            with pytest.raises(BlockingIOError):
                listener.accept()
    finally:
        listener.close()


@pytest.mark.root
async def test_a_folder_of_another_user_is_not_looked_at(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    monkeypatch.setattr(tempfile, "tempdir", str(base))  # programs of other tests have theirs elsewhere
    listener, path = listening(base)
    with listener:
        os.chown(path.parent, 65534, 65534)
        assert await programs_here() == []
        with pytest.raises(BlockingIOError):
            listener.accept()


# ---------------------------------------------------------------- text


def actor(state: str = "alive", activity: ActorActivity | None = None) -> ActorReport:
    """An actor with long names."""
    return ActorReport("ab" * 16, "A" * 200, "n" * 200, state, 4_194_304, activity, 987_654_321_098)


def test_long_names_and_many_actors_fit_80_columns() -> None:
    running = [Running("m" * 200, 123456.7), Running("n", 1.0)]
    rows = list(actor_rows([actor(activity=ActorActivity("ab" * 16, "x", running, 123_456, 99.9))]))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    assert sum(widths) + 2 * (len(widths) - 1) <= 80
    report = ProgramReport(1, "python " + "p" * 200, 12.0, {"CPU": (8.0, 2.0)}, 1 << 30, 7 << 30, [], 0)
    assert max(map(len, program_lines(report))) <= 80


def test_what_an_actor_does() -> None:
    idle = ActorActivity("", "", [], 0, None)
    assert doing(actor(activity=idle)) == "idle"
    assert doing(actor("restarting")) == "restarting"
    assert doing(actor()) == "does not answer"
    busy = ActorActivity("", "", [Running("f", 1.25), Running("g", None)], 0, None)
    assert doing(actor(activity=busy)) == "f 1.2 s and 1 more"
    assert doing(actor(activity=ActorActivity("", "", [Running("f\x1b[2J", None)], 0, None))) == r"f\x1b[2J"
