"""`tools/image.py`: it names what is missing. `make image` builds an image, and runs zcactor in it."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from tools import image

NAME = f"zcactor-{{}}-cp311-cp311-linux_{platform.machine()}.whl"


def test_the_newest_wheel_of_the_python_of_the_base(tmp_path: Path) -> None:
    others = NAME.format("0.3.0").replace("cp311", "cp312"), "zcactor-0.4.0-cp311-cp311-manylinux_2_28_riscv64.whl"
    for name in (NAME.format("0.1.0"), NAME.format("0.2.0"), *others):
        (tmp_path / name).touch()
    assert image.wheel_for("3.11", tmp_path).name == NAME.format("0.2.0")
    with pytest.raises(image.Failure, match="no wheel for the base's Python 3.13: run 'make dist' or 'make wheels WHE"):
        image.wheel_for("3.13", tmp_path)


@pytest.mark.parametrize("words", [[], ["--base", "python:3.11-slim"]])
def test_a_machine_without_buildah(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert image.main(words) == 1
    assert "is not installed: apt install buildah mmdebstrap" in capsys.readouterr().err


def test_a_step_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "buildah"
    program.write_text("#!/bin/sh\necho no such image\nexit 125\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert image.main(["--base", "none"]) == 1
    told = capsys.readouterr().err
    assert "no such image" in told and "failed, with status 125" in told
