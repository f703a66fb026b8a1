"""The options of ``zcactor run``, and what it refuses before it starts anything."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result

from zcactor.cli.main import app
from zcactor.cluster.sources import OWN, SOURCES


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (*OWN, *(name for source in SOURCES for name in source.told_by)):
        monkeypatch.delenv(name, raising=False)
    yield


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(app, ["run", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.mark.parametrize(
    ("environ", "arguments", "message"),
    [
        ({}, (), "give a program: zcactor run -- python program.py"),
        ({}, ("--nodes", "2", "--", "true"), "--nodes asks for 2, and the run has 1 rank"),
        (
            {"ZCACTOR_RANK": "3", "ZCACTOR_SIZE": "3"},
            ("true",),
            "own variables: ZCACTOR_RANK is 3 and ZCACTOR_SIZE is 3",
        ),
        ({"ZCACTOR_RANK": "x", "ZCACTOR_SIZE": "3"}, ("true",), "ZCACTOR_RANK is 'x': it must be a number"),
        ({"PMI_RANK": "0", "PMI_FD": "5"}, ("true",), "PMI-1: PMI_SIZE is not set"),
        ({"ZCACTOR_RANKS": "3"}, ("true",), "there is no setting 'ZCACTOR_RANKS'"),
    ],
)
def test_mistakes(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], arguments: tuple[str, ...], message: str
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    done = run(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments",
    [("--nodes", "0"), ("--nodes", "two"), ("--timeout", "0"), ("--timeout", "-1"), ("--grace", "-1"), ("--unknown",)],
)
def test_options_that_are_wrong(arguments: tuple[str, ...]) -> None:
    assert run(*arguments, "--", "true").exit_code == 2


@pytest.mark.parametrize("option", ["--timeout", "--grace"])
@pytest.mark.parametrize("text", ["nan", "inf"])
def test_seconds_are_finite(option: str, text: str) -> None:
    done = run(option, text, "--", "true")
    assert done.exit_code == 2
    assert f"Invalid value for '{option}': {text} is no number of seconds" in done.stderr


def test_a_descriptor_that_leads_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PMI_RANK": "0", "PMI_SIZE": "2", "PMI_FD": "999999"}.items():
        monkeypatch.setenv(name, value)
    done = run("true")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == "zcactor: the launcher's descriptor 999999 (PMI_FD) fails: Bad file descriptor\n"


def test_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("PMIX_NAMESPACE", "n")
    monkeypatch.setenv("ZCACTOR_RANK", "0")
    monkeypatch.setenv("ZCACTOR_SIZE", "1")
    done = run("--explain")
    assert (done.exit_code, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "own variables    rank 0 of 1, the head is here"
    assert "Open MPI         rank 1 of 4, the head is found by a file in a shared folder" in lines
    assert lines[-2:] == [
        "They disagree, and the first one that is there decides.",
        "decided by       own variables: rank 0 of 1, the head is here",
    ]
    monkeypatch.setenv("ZCACTOR_SIZE", "0")
    done = run("--explain", "true")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-2].startswith("decided by       nothing: own variables: ZCACTOR_SIZE is '0'")
