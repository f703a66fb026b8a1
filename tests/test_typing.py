"""Users' programs under mypy and pyright: the errors reported are exactly those that the programs' comments expect.

A line of ``tests/typing/*.py`` that must be refused ends in ``# expect: mypy[code] pyright[rule,rule]``; every other
line must pass, with the types that its `assert_type` claims. Programs named ``plugin_*`` are checked with the mypy
plugin; all others with it and without it, which must make no difference.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(500)  # seconds: long enough for a cold cache and a first download of pyright

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = sorted((ROOT / "tests" / "typing").glob("*.py"))
PLAIN = [path for path in PROGRAMS if not path.name.startswith("plugin_")]

Errors = Counter[tuple[str, int, str]]
"""The number of times that each (file name, line, code) occurs."""


def expected(programs: list[Path], checker: str) -> Errors:
    """The errors that the comments of `programs` announce for `checker`."""
    found: Errors = Counter()
    for path in programs:
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            _, marked, comment = line.partition("# expect: ")
            if not marked:
                continue
            parts = re.findall(r"(mypy|pyright)\[([\w,-]+)\]", comment)
            assert " ".join(f"{name}[{codes}]" for name, codes in parts) == comment, f"{path.name}:{number}: {comment}"
            found.update(
                (path.name, number, code) for name, codes in parts if name == checker for code in codes.split(",")
            )
    return found


def compare(found: Errors, wanted: Errors, messages: dict[tuple[str, int, str], str]) -> None:
    """Fail with one line for each difference."""
    lines = [f"{name}:{line}: not reported: {code}" for name, line, code in (wanted - found)]
    lines += [f"{at[0]}:{at[1]}: not expected: [{at[2]}] {messages[at]}" for at in (found - wanted)]
    assert not lines, "\n" + "\n".join(sorted(lines))


def run_mypy(programs: list[Path], plugin: bool, folder: Path) -> tuple[Errors, dict[tuple[str, int, str], str]]:
    """The errors that a user's strict mypy reports for `programs`, and their messages."""
    config = folder / "mypy.ini"
    config.write_text("[mypy]\nstrict = True\n" + ("plugins = zcactor.mypy_plugin\n" if plugin else ""))
    cache = ROOT / ".mypy_cache" / ("typing-plugin" if plugin else "typing")  # numpy's types take a while to read
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--config-file", str(config), "--cache-dir", str(cache)),
            *("--output", "json", "--follow-imports", "silent", "--python-version", "3.11", *map(str, programs)),
        ],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "MYPYPATH": str(ROOT)},
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    errors: Errors = Counter()
    messages = {}
    for line in done.stdout.splitlines():
        record = json.loads(line)
        if record["severity"] == "error":
            at = (Path(record["file"]).name, int(record["line"]), str(record["code"]))
            errors[at] += 1
            messages[at] = record["message"]
    return errors, messages


@pytest.fixture(scope="session")
def pyright() -> list[str]:
    """The command, or a skip where its JavaScript part is neither installed nor can be downloaded."""
    command = [sys.executable, "-m", "pyright"]
    try:
        done = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, timeout=300, env=os.environ | PYRIGHT_ENVIRONMENT
        )
    except subprocess.TimeoutExpired:
        pytest.skip("pyright: its npm package could not be fetched within 300 s")
    if done.returncode != 0:
        pytest.skip(f"pyright does not run here: {(done.stderr or done.stdout).strip()[-300:]}")
    return command


PYRIGHT_ENVIRONMENT = {"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1", "PYRIGHT_PYTHON_GLOBAL_NODE": "1"}


@pytest.mark.slow
def test_programs_are_checked_by_mypy_with_the_plugin(tmp_path: Path) -> None:
    errors, messages = run_mypy(PROGRAMS, plugin=True, folder=tmp_path)
    compare(errors, expected(PROGRAMS, "mypy"), messages)


@pytest.mark.slow
def test_the_plugin_agrees_with_mypys_cache(tmp_path: Path) -> None:
    wanted = expected(PROGRAMS, "mypy")
    programs = [Path(shutil.copy(path, tmp_path)) for path in PROGRAMS]
    run_mypy(programs, plugin=True, folder=tmp_path)
    for path in programs:  # mypy reads each program anew, and takes the modules that it imports from the cache
        path.write_text(path.read_text() + "# changed\n")
        errors, messages = run_mypy(programs, plugin=True, folder=tmp_path)
        compare(errors, wanted, messages)


@pytest.mark.slow
def test_programs_are_checked_by_mypy_without_the_plugin(tmp_path: Path) -> None:
    errors, messages = run_mypy(PLAIN, plugin=False, folder=tmp_path)
    compare(errors, expected(PLAIN, "mypy"), messages)


@pytest.mark.slow
def test_programs_are_checked_by_pyright(tmp_path: Path, pyright: list[str]) -> None:
    project = tmp_path / "pyrightconfig.json"
    settings = {
        "include": [os.path.relpath(ROOT / "tests" / "typing", tmp_path)],  # pyright takes no absolute path here
        "extraPaths": [str(ROOT)],
        "pythonVersion": "3.11",
        "typeCheckingMode": "standard",
    }
    project.write_text(json.dumps(settings))
    done = subprocess.run(
        [*pyright, "--project", str(project), "--pythonpath", sys.executable, "--outputjson"],
        capture_output=True,
        text=True,
        env=os.environ | PYRIGHT_ENVIRONMENT,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    errors: Errors = Counter()
    messages = {}
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == len(PROGRAMS)
    for record in report["generalDiagnostics"]:
        at = (Path(record["file"]).name, record["range"]["start"]["line"] + 1, record.get("rule", "syntax"))
        errors[at] += 1
        messages[at] = record["message"].replace("\n", " ")
    compare(errors, expected(PROGRAMS, "pyright"), messages)
