"""The command line as users run it: in processes of its own, on this machine."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import pytest

import zcactor
from zcactor.config import Config

ROOT = Path(__file__).resolve().parents[2]
SECRET = "5ec4e7" * 10
WITHOUT = "import runpy, sys; sys.modules['{}'] = None; runpy.run_module('zcactor', run_name='__main__')"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A working directory, whose ``zcactor.toml`` counts."""
    return tmp_path


def run(
    here: Path, *arguments: str, environ: Mapping[str, str] | None = None, start: tuple[str, ...] = ("-m", "zcactor")
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m zcactor`` with `arguments`, away from this machine's own settings."""
    own = {name for name in os.environ if name.startswith("ZCACTOR_")}
    inherited = {name: value for name, value in os.environ.items() if name not in own}
    return subprocess.run(
        [sys.executable, *start, *arguments],
        cwd=here,
        env={**inherited, "PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": str(here / "user"), **(environ or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )


@pytest.mark.slow
def test_doctor(here: Path) -> None:
    (here / "zcactor.toml").write_text("recv_depth = 77\n")
    done = run(here, "doctor", environ={"ZCACTOR_NAMESPACE": "mine", "ZCACTOR_TOKEN": SECRET})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("zcactor works here: arrays on this host go by reference, ")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["recv_depth", "77", "zcactor.toml"] in lines
    assert ["namespace", "mine", "ZCACTOR_NAMESPACE"] in lines
    assert ["peers", "on", "this", "host", "get", "local"] in lines
    assert SECRET not in done.stdout


@pytest.mark.slow
def test_doctor_as_json(here: Path) -> None:
    done = run(here, "doctor", "--json", environ={"ZCACTOR_TOKEN": SECRET})
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["version"] == zcactor.__version__
    assert [setting["name"] for setting in report["settings"]] == [field.name for field in fields(Config)]
    assert [transport["name"] for transport in report["transports"]] == ["local", "verbs", "tcp"]
    assert report["usable"] is True
    assert SECRET not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--json",)])
def test_exit_status_where_nothing_is_usable(here: Path, options: tuple[str, ...]) -> None:
    environ = {"ZCACTOR_TRANSPORTS": "verbs", "ZCACTOR_VERBS": "off"}
    done = run(here, "doctor", *options, environ=environ)
    assert (done.returncode, done.stderr) == (1, "")
    assert "the setting verbs is off" in done.stdout
    assert options or done.stdout.startswith("no transport works here: verbs: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environ", "file", "message"),
    [
        ({"ZCACTOR_ADRESS": SECRET}, "", "no setting 'ZCACTOR_ADRESS'; did you mean 'ZCACTOR_ADDRESS'"),
        ({"ZCACTOR_NUM_CPUS": "many"}, "", "ZCACTOR_NUM_CPUS: num_cpus = 'many' must be int"),
        ({}, "recv_depth = 0", "zcactor.toml: recv_depth = 0 must be int"),
        ({}, f"token = '{SECRET}'", "there is no setting 'token'"),
        ({}, "recv_depth =", "is not valid TOML"),
    ],
)
def test_an_error_in_the_configuration_is_one_line(
    here: Path, environ: Mapping[str, str], file: str, message: str
) -> None:
    (here / "zcactor.toml").write_text(file)
    done = run(here, "doctor", environ=environ)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("zcactor: ")
    assert message in line
    assert SECRET not in line


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [("doctor", "--frobnicate"), ("doctor", "extra"), ("surgeon",), ("--frobnicate",)]
)
def test_what_is_not_known_is_refused(here: Path, arguments: tuple[str, ...]) -> None:
    done = run(here, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert arguments[-1] in done.stderr


@pytest.mark.slow
def test_version(here: Path) -> None:
    done = run(here, "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"zcactor {zcactor.__version__}\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("--version",), ("doctor",)])
def test_nobody_reads_the_output(here: Path, arguments: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as output:
        command = [sys.executable, "-m", "zcactor", *arguments]
        done = subprocess.run(
            command, cwd=here, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=output, stderr=subprocess.PIPE,
            check=False, timeout=50,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("--version",), ("--help",), ("doctor",), ("doctor", "--json"), ("token",), ("stop",), ("run", "--explain"),
        ("k8s", "render", "--name", "a", "--image", "b", "--nodes", "1", "--secret", "s", "true"),
    ],
)  # fmt: skip
def test_output_that_cannot_be_written_is_told_in_one_sentence(here: Path, arguments: tuple[str, ...]) -> None:
    own = {"PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": str(here), "XDG_STATE_HOME": str(here)}
    with open("/dev/full", "wb") as output:
        done = subprocess.run(
            [sys.executable, "-m", "zcactor", *arguments], cwd=here, env={**os.environ, **own}, stdout=output,
            stderr=subprocess.PIPE, text=True, check=False, timeout=50,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (
        1, "zcactor: standard output cannot be written to: No space left on device\n"
    )  # fmt: skip


@pytest.mark.slow
def test_help(here: Path) -> None:
    done = run(here, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "doctor" in done.stdout
    assert "..." not in done.stdout.partition("\n")[2]
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "--json" in run(here, "doctor", "--help").stdout


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["click", "rich"])
def test_without_the_extra(here: Path, missing: str) -> None:
    done = run(here, "doctor", start=("-c", WITHOUT.format(missing)))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"zcactor: the command line needs {missing}: pip install 'zcactor[cli]'\n"


@pytest.mark.slow
def test_importing_the_package_imports_none_of_it(here: Path) -> None:
    program = "import sys, zcactor; print([n for n in sys.modules if n.partition('.')[0] in ('rich', 'click')"
    program += " or n.startswith(('zcactor.cli', 'zcactor.__main__'))])"
    done = run(here, start=("-c", program))
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_the_script_is_the_module() -> None:
    script = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["zcactor"]
    module, _, name = script.partition(":")
    assert module == "zcactor.__main__"
    assert callable(getattr(importlib.import_module(module), name))
