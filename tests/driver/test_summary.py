"""The closing line of a program that has used arrays: where it is printed, once, and nothing else with it."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import zcactor as zc
from zcactor.driver.runtimes import summary_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
import numpy as np
import zcactor as zc

@zc.actor
class Scaler:
    def scale(self, x, factor):
        return x * factor

async def main():
    async with zc.init({arguments}):
        scaler = await Scaler.spawn()
        {body}

zc.run(main())
"""
ARRAYS = "[await scaler.scale(np.ones(1 << 17), 2.0) for _ in range(3)]"
LINE = r"zcactor: 3 calls, 6 MiB by reference, 0 bytes copied by the program"


def run(
    folder: Path, arguments: str = "", body: str = ARRAYS, *, terminal: bool = False, environ: Mapping[str, str] = {}
) -> str:
    """The standard error of a program, which is a pipe or a terminal."""
    program = folder / "program.py"
    program.write_text(PROGRAM.format(arguments=arguments, body=body))
    ours, theirs = pty.openpty() if terminal else os.pipe()
    keep = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    with open(theirs, "wb", buffering=0) as output:
        process = subprocess.Popen(
            [sys.executable, program], stdout=subprocess.DEVNULL, stderr=output, cwd=folder,
            env={**keep, "PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": str(folder), **environ},
        )  # fmt: skip
    said = b""
    with open(ours, "rb", buffering=0) as error:
        try:
            while block := error.read(4096):
                said += block
        except OSError:  # a terminal whose other end was closed
            pass
    assert process.wait(60) == 0, said
    return said.decode().replace("\r\n", "\n")


def test_a_program_in_a_terminal_ends_with_the_line(tmp_path: Path) -> None:
    assert re.fullmatch(LINE + "\n", run(tmp_path, terminal=True))


@pytest.mark.parametrize(
    ("arguments", "environ", "terminal", "printed"),
    [
        ("", {}, False, False),
        ("summary='off'", {}, True, False),
        ("summary='on'", {}, False, True),
        ("", {"ZCACTOR_SUMMARY": "on"}, False, True),
    ],
)
def test_the_setting(tmp_path: Path, arguments: str, environ: Mapping[str, str], terminal: bool, printed: bool) -> None:
    said = run(tmp_path, arguments, environ=environ, terminal=terminal)
    assert re.fullmatch(f"({LINE}\n)" if printed else "", said)


def test_a_program_without_arrays_says_nothing(tmp_path: Path) -> None:
    assert run(tmp_path, "summary='on'", "await scaler.scale(3, 4)") == ""


def test_arrays_in_a_list_count(tmp_path: Path) -> None:
    said = run(tmp_path, "summary='on'", "await scaler.scale([np.ones(1 << 17) for _ in range(20)], 1)")
    assert said == "zcactor: 1 call, 20 MiB by reference, 0 bytes copied by the program\n"


LOG = "sys.stderr = type('Log', (), {'write': lambda self, text: 1, 'flush': lambda self: None})()"
"""Standard error as an object that has no more than the interpreter asks for."""


@pytest.mark.parametrize("arguments", ["summary='on'", ""])
@pytest.mark.parametrize("error", ["sys.stderr.close()", "sys.stderr = None", LOG])
def test_a_standard_error_that_is_none_ends_nothing(tmp_path: Path, error: str, arguments: str) -> None:
    run(tmp_path, arguments, f"{ARRAYS}\n        {error}")


def test_a_program_with_pytest_in_it_says_nothing(tmp_path: Path) -> None:
    assert run(tmp_path, "", f"import pytest\n        {ARRAYS}", terminal=True) == ""


def test_a_program_that_exits_without_the_end_has_the_line_too(tmp_path: Path) -> None:
    said = run(tmp_path, "summary='on'", f"{ARRAYS}\n        sys.exit(0)")
    assert len(re.findall(LINE, said)) == 1


def test_the_line() -> None:
    assert summary_of(0, 0, 0, 0) == ""
    assert summary_of(5, 0, 0, 0) == ""
    assert summary_of(1, 1 << 30, 2048, 5) == (
        "zcactor: 1 call, 1 GiB by reference, 2 KiB from other hosts, 5 bytes copied by the program"
    )


async def test_a_wrong_value_is_refused() -> None:
    with pytest.raises(ValueError, match="summary = 'yes'"):
        await zc.init(summary="yes")  # type: ignore[arg-type]
