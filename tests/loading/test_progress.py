"""Progress, reported to a callable and on the terminal."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import zcactor as zc
from tests.loading.samples import MIB, archive, saved

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [KeyboardInterrupt, EOFError, OSError])
async def test_what_the_callable_raises_comes_through(tmp_path: Path, kind: type[BaseException]) -> None:
    raised = kind(22, "from the callable")
    array = np.zeros(20 * MIB, "u1")
    np.save(tmp_path / "a.npy", array)
    np.savez(tmp_path / "b.npz", first=np.ones(10), second=array)
    np.savez_compressed(tmp_path / "c.npz", first=np.ones(10), second=array)

    before = zc.stats().store_used

    def give_up(done: int, total: int) -> None:
        if done > total // 2:
            raise raised

    for name in ("a.npy", "b.npz", "c.npz"):
        with pytest.raises(kind) as caught:
            zc.load(tmp_path / name, progress=give_up)
        assert caught.value is raised
        assert zc.stats().store_used == before


class Terminal(io.StringIO):
    """A stream that keeps its text, and claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def sparse(path: Path, nbytes: int) -> Path:
    """Make a file of zeros that takes no room on the disk."""
    with path.open("wb") as file:
        file.truncate(nbytes)
    return path


@pytest.mark.slow
async def test_progress_to_a_callable(tmp_path: Path) -> None:
    array = np.zeros(20 * MIB, "u1")
    np.save(tmp_path / "a.npy", array)
    np.save(tmp_path / "empty.npy", array[:0])
    np.savez(tmp_path / "b.npz", first=array[:100], second=array)
    np.savez_compressed(tmp_path / "c.npz", first=array[:100], second=array)
    sizes = {"a.npy": 20 * MIB, "empty.npy": 0}
    sizes["b.npz"] = sizes["c.npz"] = len(saved(array)) + len(saved(array[:100]))
    for name, size in sizes.items():
        told: list[tuple[int, int]] = []
        zc.load(tmp_path / name, progress=lambda done, total, told=told: told.append((done, total)))  # type: ignore[misc]
        assert {total for _, total in told} == {size}
        steps = [done for done, _ in told]
        assert steps[0] == 0
        assert steps[-1] == size
        assert steps == sorted(steps)
        assert max(np.diff([*steps, size])) <= 16 * MIB  # the file was read in chunks


@pytest.mark.slow
async def test_progress_on_stderr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = sparse(tmp_path / "small\n", MIB), sparse(tmp_path / "large", 256 * MIB)
    shown: dict[tuple[str, bool, bool | None], bool] = {}
    for path in (small, large):
        for kind in (Terminal, io.StringIO):
            for progress in (None, True, False):
                stream = kind()
                monkeypatch.setattr(sys, "stderr", stream)
                assert zc.load(path, dtype="u1", progress=progress).nbytes == path.stat().st_size
                text = stream.getvalue()
                shown[path.name, kind is Terminal, progress] = bool(text)
                if text:
                    *lines, last = text.removeprefix("\r").split("\r")
                    name = "large" if path is large else r"'small\\n'"  # no file name steers the terminal
                    for line in lines:
                        assert re.fullmatch(rf"{name}: +\d+ %  +\d+\.\d\d GB/s", line)
                    assert re.fullmatch(rf"{name}: 100 %  +\d+\.\d\d GB/s\n", last)
    assert {case for case, is_shown in shown.items() if is_shown} == {
        ("small\n", True, True), ("small\n", False, True), ("large", True, True), ("large", False, True),
        ("large", True, None),
    }  # fmt: skip
    monkeypatch.setattr(sys, "stderr", None)  # as in programs without a console
    assert zc.load(small, dtype="u1", progress=True).nbytes == MIB


async def test_the_line_ends_when_reading_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytearray(archive({"a.npy": saved(np.ones(1000))}))
    data[500] ^= 1
    (tmp_path / "a.npz").write_bytes(data)
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with pytest.raises(ValueError, match="CRC-32"):
        zc.load(tmp_path / "a.npz", progress=True)
    text = stream.getvalue()
    assert text.startswith("\ra.npz: ")
    assert text.endswith("GB/s\n")
