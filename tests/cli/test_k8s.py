"""``zcactor k8s render``: its text, and that nothing is printed where something is refused."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from zcactor.cli.main import app

GOOD = ("--name", "train", "--image", "me/train:1", "--nodes", "2")


def render(*arguments: str) -> Result:
    result = CliRunner().invoke(app, ["k8s", "render", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_the_text() -> None:
    done = render(*GOOD, "--rdma", "rdma/hca=2", "--", "python", "train.py", "--kind", "x y")
    assert done.exit_code == 0 and done.stderr.startswith("The Secret holds a new token")
    secret, service, job = json.loads(done.stdout)["items"]
    assert (secret["kind"], service["kind"], job["kind"]) == ("Secret", "Service", "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"][-4:] == ["python", "train.py", "--kind", "x y"]
    assert container["resources"]["limits"] == {"rdma/hca": "2"}


def test_each_token_is_new() -> None:
    tokens = [json.loads(render(*GOOD, "true").stdout)["items"][0]["stringData"]["token"] for _ in range(2)]
    assert len(set(tokens)) == 2
    assert all(len(bytes.fromhex(token)) == 32 for token in tokens)


def test_a_secret_that_exists() -> None:
    done = render(*GOOD, "--secret", "mine", "--kind", "lws", "true")
    assert done.exit_code == 0
    (found,) = json.loads(done.stdout)["items"]
    assert found["kind"] == "LeaderWorkerSet"


def test_a_file_that_only_the_user_can_read(tmp_path: Path) -> None:
    file = tmp_path / "train.json"
    done = render(*GOOD, "--output", str(file), "true")
    assert (done.exit_code, done.output) == (0, "")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(json.loads(file.read_text())["items"][0]["stringData"]["token"]) == 64
    again = render(*GOOD, "--output", str(file), "true")
    assert again.exit_code == 2
    assert f"{file} exists; remove it, or give another file" in again.stderr
    nowhere = render(*GOOD, "--output", str(tmp_path / "none" / "x"), "true")
    assert nowhere.exit_code == 2
    assert "cannot be written: No such file or directory" in nowhere.stderr


@pytest.mark.parametrize(("mode", "more", "status"), [(0o644, (), 2), (0o600, (), 0), (0o644, ("--secret", "mine"), 0)])
def test_a_token_does_not_go_to_a_file_that_others_can_read(
    tmp_path: Path, mode: int, more: tuple[str, ...], status: int
) -> None:
    file = tmp_path / "train.json"
    file.touch()
    file.chmod(mode)
    command = [sys.executable, "-m", "zcactor", "k8s", "render", *GOOD, *more, "true"]
    with open(file, "w") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == status
    assert (file.stat().st_size == 0) is (status == 2)
    assert ("use --output FILE in place of >FILE" in done.stderr) is (status == 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (GOOD, "give a program: zcactor k8s render ... -- python program.py"),
        ((*GOOD[:1], "Train", *GOOD[2:], "true"), "--name is 'Train'"),
        ((*GOOD, "--rdma", "rdma/hca", "true"), "--rdma is 'rdma/hca': it must be RESOURCE=N"),
        ((*GOOD, "--rdma", "rdma/hca=two", "true"), "--rdma is 'rdma/hca=two'"),
        ((*GOOD, "--rdma", "rdma/hca=" + "9" * 5000, "true"), "it must be RESOURCE=N"),
        ((*GOOD, "--rdma", "=1", "true"), "--rdma names the resource ''"),
        ((*GOOD, "--memory", "8gb", "true"), "--memory is '8gb'"),
    ],
)
def test_mistakes(arguments: tuple[str, ...], message: str) -> None:
    done = render(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments",
    [GOOD[:4], GOOD[2:], (*GOOD, "--kind", "Pod", "true"), (*GOOD, "--nodes", "two", "true"), (*GOOD, "--cpus", "x")],
)
def test_options_that_are_wrong(arguments: tuple[str, ...]) -> None:
    done = render(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")


@pytest.mark.slow
def test_an_argument_that_is_no_text() -> None:
    command: list[str | bytes] = [sys.executable, "-m", "zcactor", "k8s", "render", *GOOD, "--", "a", b"\xff"]
    done = subprocess.run(command, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"is no UTF-8" in done.stderr
