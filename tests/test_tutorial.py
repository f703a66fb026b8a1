"""The tutorial, followed as it says: each program is saved under its name, run, and prints what the page shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.hosts import netns

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
TUTORIAL = ROOT / "docs" / "tutorial"
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEAD = "127.0.0.1:7433"
"""The address of the head on the page on clusters. Here the head listens at any port, as others may hold
that one."""


class Step(NamedTuple):
    """A program of a page."""

    name: str
    program: str
    shown: str | None
    """The block of text right behind it, if there is one."""


def steps(page: str) -> list[Step]:
    """The programs of a page, in order."""
    text = (TUTORIAL / page).read_text()
    found, blocks = [], list(FENCE.finditer(text))
    for number, block in enumerate(blocks):
        if block[1] != "python":
            continue
        before = text[blocks[number - 1].end() if number else 0 : block.start()]
        (name,) = re.findall(r"Save this as\s+`(\w+\.py)`", before)
        following = blocks[number + 1] if number + 1 < len(blocks) else None
        shown = following[2] if following is not None and following[1] == "text" else None
        found.append(Step(name, block[2], shown))
    return found


def run(*command: str, folder: Path, **environment: str) -> str:
    """The output of a command, which has to succeed and to complain of nothing."""
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("page", ["1-first-actor.md", "2-arrays.md", "3-streams.md"])
def test_a_page(page: str, tmp_path: Path) -> None:
    followed = steps(page)
    assert len(followed) >= 2
    for step in followed:
        (tmp_path / step.name).write_text(step.program)
        assert run(sys.executable, step.name, folder=tmp_path) == step.shown


Run = Callable[..., str]
"""Runs a program of Python with arguments, and returns its output."""


def follow_clusters(folder: Path, at: Sequence[Run], head: Sequence[str], transport: str) -> None:
    """Follow the page on clusters.

    Args:
        folder: for its programs.
        at: the ways to run a program on the host of the head, and on that of the other node.
        head: more arguments of the command that starts the head.
        transport: the way from one node to the other, which the page's first program prints.
    """
    text = (TUTORIAL / "4-two-nodes.md").read_text()
    commands = [line.split()[1:] for line in text.splitlines() if line.startswith("zcactor ")]
    assert [command[0] for command in commands] == ["start", "start", "status", "stop"]
    start, join, status, stop = commands
    first, second = at
    told = first("-m", "zcactor", *start, *head)
    address = re.findall(r"head ready at (\S+)", told)[0]
    try:
        second("-m", "zcactor", *(word.replace(HEAD, address) for word in join))
        assert first("-m", "zcactor", *status).count("CPU 1") == 2
        for step in steps("4-two-nodes.md"):
            path = folder / step.name
            path.write_text(step.program.replace(HEAD, address))
            printed = first(str(path))
            assert printed == (step.shown or "visit 1\n").replace("by local", f"by {transport}")
        assert second(str(path)) == "visit 2\n"
    finally:
        for each in dict.fromkeys(at):
            each("-m", "zcactor", *stop)


def test_the_page_on_clusters(tmp_path: Path) -> None:
    pytest.importorskip("click")
    (tmp_path / "run").mkdir(mode=0o700)
    own = {
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_RUNTIME_DIR": str(tmp_path / "run"),
    }

    def here(*arguments: str) -> str:
        return run(sys.executable, *arguments, folder=tmp_path, **own)

    follow_clusters(tmp_path, [here, here], ["--port", "0"], "local")


@pytest.mark.root
@pytest.mark.skipif(netns.missing() is not None, reason=str(netns.missing()))
def test_the_page_on_clusters_with_a_host_for_each_node(tmp_path: Path) -> None:
    pytest.importorskip("click")
    own = {"XDG_CONFIG_HOME": str(tmp_path / "config"), "XDG_STATE_HOME": str(tmp_path / "state")}

    def on(host: netns.Host) -> Run:
        def there(*arguments: str) -> str:
            with host.start(
                sys.executable, *arguments,
                env={**own, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            ) as process:  # fmt: skip
                printed, complained = process.communicate(timeout=50)
            assert (process.returncode, complained) == (0, ""), f"{printed}\n{complained}"
            return str(printed)

        return there

    with netns.Network(2, direct=True) as hosts:
        on(hosts[0])("-m", "zcactor", "token")  # between hosts a cluster asks for one; the hosts here share files
        follow_clusters(tmp_path, [on(host) for host in hosts], ["--host", hosts[0].address], "tcp")
