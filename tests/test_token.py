"""The token: where it is looked for, how it is written, and files that are refused because others can get at them."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.descriptors import opened
from tests.hosts.netns import missing
from tests.kubelet import GROUP, VERSION, mounting
from zcactor.errors import AuthenticationError
from zcactor.token import TOKEN_NBYTES, default_file, find_token, make_token_file, parse_token, read_token_file

ONE, TWO, THREE, FOUR = (f"{number:02x}" * TOKEN_NBYTES for number in (0xA1, 0xB2, 0xC3, 0xD4))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A good token file."""
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_text(ONE + "\n")
    return path


def all_said(error: BaseException) -> str:
    """All text that a person may see of an error and of its causes."""
    said = ""
    found: BaseException | None = error
    while found is not None:
        said += f"{found} {found!r} {found.args}"
        found = found.__cause__ or found.__context__
    return said


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.write_text(text)
    return path


# ---- sources


def test_order_of_sources(tmp_path: Path) -> None:
    named = write(tmp_path / "named", TWO)
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert default_file(environ) == tmp_path / "zcactor" / "token"
    assert find_token(None, environ) is None
    write(default_file(environ), FOUR)
    assert find_token(None, environ) == (bytes.fromhex(FOUR), str(default_file(environ)))
    environ["ZCACTOR_TOKEN"] = THREE
    assert find_token(None, environ) == (bytes.fromhex(THREE), "ZCACTOR_TOKEN")
    environ["ZCACTOR_TOKEN_FILE"] = str(named)
    assert find_token(None, environ) == (bytes.fromhex(TWO), str(named))
    assert find_token(ONE, environ) == (bytes.fromhex(ONE), "the argument token")


def test_empty_variables_are_none(tmp_path: Path) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path), "ZCACTOR_TOKEN": "", "ZCACTOR_TOKEN_FILE": ""}
    assert find_token(None, environ) is None


def test_default_file_without_a_variable() -> None:
    for environ in ({}, {"XDG_CONFIG_HOME": ""}, {"XDG_CONFIG_HOME": "relative"}):
        environ["HOME"] = "/home/somebody"
        assert default_file(environ) == Path("/home/somebody/.config/zcactor/token")


def test_a_better_source_that_is_wrong_is_not_passed_over(tmp_path: Path) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path), "ZCACTOR_TOKEN": ONE}
    write(default_file(environ), ONE)
    with pytest.raises(AuthenticationError, match="^the argument token: "):
        find_token("", environ)
    environ["ZCACTOR_TOKEN_FILE"] = str(tmp_path / "missing")
    with pytest.raises(AuthenticationError, match=f"ZCACTOR_TOKEN_FILE names {tmp_path}/missing, which does not exist"):
        find_token(None, environ)
    environ = {**environ, "ZCACTOR_TOKEN_FILE": "", "ZCACTOR_TOKEN": ONE[:-1]}
    with pytest.raises(AuthenticationError, match="^ZCACTOR_TOKEN: "):
        find_token(None, environ)


# ---- the form of a token


@pytest.mark.parametrize("text", [ONE, ONE.upper(), f"{ONE}\n", f"\t {ONE} \r\n"])
def test_forms_that_are_read(text: str, file: Path) -> None:
    assert parse_token(text, "here") == bytes.fromhex(ONE)
    file.write_bytes(text.encode())
    assert read_token_file(file) == bytes.fromhex(ONE)


WRONG = {
    "nothing": "",
    "space": "  \n",
    "one digit less": ONE[:-1],
    "one byte less": ONE[:-2],
    "one digit more": ONE + "0",
    "one byte more": ONE + "00",
    "twice": ONE + ONE,
    "very long": ONE * 100_000,
    "spaces between": " ".join(ONE[at : at + 2] for at in range(0, 64, 2)),
    "spaces to the right length": "a1 " * 21 + "a",
    "no digits": "secret-pass-word" * 4,
    "prefix": "0x" + ONE[:-2],
    "other digits": "\u0661" * 64,
    "not ASCII": "\xe4" * 64,
    "nul": ONE[:-1] + "\0",
}


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG)
def test_what_is_no_token_is_refused_and_not_shown(text: str, file: Path) -> None:
    with pytest.raises(AuthenticationError, match="^some place: a token is 64 hexadecimal digits") as parsed:
        parse_token(text, "some place")
    file.write_text(text, "utf-8")
    with pytest.raises(AuthenticationError, match=f"^{file}: a token is 64 hexadecimal digits") as read:
        read_token_file(file)
    for error in (parsed.value, read.value):
        said = all_said(error)
        assert "zcactor token" in said
        for secret in {text.strip()[:8], text.strip()[-8:]} - {""}:
            assert secret not in said


# ---- files that are refused


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o620, 0o604, 0o601, 0o610, 0o660, 0o777])
def test_a_file_that_others_can_get_at(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(AuthenticationError) as refused:
        read_token_file(file)
    said = all_said(refused.value)
    assert f"{file} has mode {mode:04o}" in said
    assert "zcactor token" in said
    assert f"chmod 600 {file}" in said
    assert ONE[:8] not in said
    file.chmod(0o600)
    assert read_token_file(file) == bytes.fromhex(ONE)


@pytest.mark.parametrize("mode", [0o600, 0o700])
def test_a_file_that_only_we_can_get_at(file: Path, mode: int) -> None:
    file.chmod(mode)
    assert read_token_file(file) == bytes.fromhex(ONE)


def test_a_link(file: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(file)
    with pytest.raises(AuthenticationError, match=f"the token file {link} cannot be read: "):
        read_token_file(link)
    with pytest.raises(AuthenticationError, match=f"the token file {link} cannot be read: "):
        find_token(None, {"ZCACTOR_TOKEN_FILE": str(link)})


def test_a_directory(tmp_path: Path) -> None:
    with pytest.raises(AuthenticationError, match=f"the token file {tmp_path} is no file"):
        read_token_file(tmp_path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(AuthenticationError, match="is no file"):
        read_token_file(tmp_path / "pipe")


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_token_file(tmp_path / "missing")


def test_a_path_through_a_file(file: Path) -> None:
    with pytest.raises(AuthenticationError, match="cannot be read: Not a directory"):
        read_token_file(file / "token")


@pytest.mark.root
def test_a_file_of_somebody_else(file: Path) -> None:
    os.chown(file, 65534, 65534)
    with pytest.raises(AuthenticationError, match=f"{file} belongs to uid 65534, and this process is uid 0") as refused:
        read_token_file(file)
    assert "zcactor token" in all_said(refused.value)
    assert ONE[:8] not in all_said(refused.value)


def test_descriptors_are_closed(file: Path, tmp_path: Path) -> None:
    before = opened()
    read_token_file(file)
    for bad in (tmp_path, tmp_path / "missing"):
        with pytest.raises((AuthenticationError, FileNotFoundError)):
            read_token_file(bad)
    file.chmod(0o644)
    with pytest.raises(AuthenticationError):
        read_token_file(file)
    assert opened() <= before


# ---- Secrets that Kubernetes has mounted


CAN_MOUNT = pytest.mark.skipif(missing() is not None, reason=str(missing()))

READING = """
import json, os, sys
from zcactor.errors import AuthenticationError
from zcactor.token import find_token
uid, *groups = map(int, sys.argv[2:])
os.setgroups(groups)
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
try:
    token, place = find_token(None, {"ZCACTOR_TOKEN_FILE": sys.argv[1]})
except AuthenticationError as error:
    print(json.dumps({"refused": str(error)}))
else:
    print(json.dumps({"token": token.hex(), "place": place}))
"""


def mounted(
    *, uid: int = 0, groups: tuple[int, ...] = (), then: str = ":", mode: int = 0o440, owner: int = 0,
    read_only: bool = True,
) -> dict[str, str]:  # fmt: skip
    """The token that a process of some user finds in a Secret's volume, or its refusal.

    Others than root may not search the folders of tests, so it is mounted on ``/mnt``.
    """
    command = [sys.executable, "-c", READING, "/mnt/token", *map(str, (uid, *groups))]
    mounts = mounting("/mnt", ONE, mode=mode, owner=owner, read_only=read_only)
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", f'{mounts}; {then}; exec "$@"', "sh", *command],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.root
@pytest.mark.slow
@CAN_MOUNT
@pytest.mark.parametrize(
    ("uid", "groups", "mode"), [(0, (), 0o440), (0, (), 0o400), (1000, (GROUP,), 0o440), (1000, (5, GROUP), 0o440)]
)
def test_a_mounted_secret(uid: int, groups: tuple[int, ...], mode: int) -> None:
    assert mounted(uid=uid, groups=groups, mode=mode) == {"token": ONE, "place": "/mnt/token"}


@pytest.mark.root
@pytest.mark.slow
@CAN_MOUNT
@pytest.mark.parametrize(
    ("uid", "mode", "owner", "words"),
    [
        (0, 0o444, 0, "has mode 0444: every user of the container can get at it; mount the Secret with"),
        (0, 0o644, 0, "has mode 0644: every user"),
        (0, 0o460, 0, "has mode 0460"),
        (1000, 0o440, 0, "cannot be read by uid 1000; mount the Secret with defaultMode 0440"),
        (0, 0o440, 1000, "cannot be read: Too many levels of symbolic links"),
    ],
)
def test_a_mounted_secret_that_is_refused(uid: int, mode: int, owner: int, words: str) -> None:
    found = mounted(uid=uid, mode=mode, owner=owner)
    assert list(found) == ["refused"] and words in found["refused"]
    assert ONE[:8] not in found["refused"]


@pytest.mark.root
@pytest.mark.slow
@CAN_MOUNT
@pytest.mark.parametrize(
    "change",
    [
        'mount -o remount,bind,rw DIR; exec "$@"',
        "ln -sfn ../mnt/VERSION DIR/..data",
        "ln -sf VERSION/token DIR/token",
        "chown 1000 DIR",
        "mount -t tmpfs tmpfs DIR/VERSION; echo TOKEN >DIR/VERSION/token; chmod 440 DIR/VERSION/token",
    ],
)
def test_what_only_looks_like_a_mounted_secret(change: str) -> None:
    for word, text in {"DIR": "/mnt", "VERSION": VERSION, "TOKEN": ONE}.items():
        change = change.replace(word, text)
    found = mounted(read_only=False, then=f"{change}; mount -o remount,bind,ro /mnt")
    assert "cannot be read: Too many levels of symbolic links" in found["refused"]


def test_links_like_a_secret_s_where_no_secret_is_mounted(file: Path, tmp_path: Path) -> None:
    (tmp_path / VERSION).mkdir()
    file.rename(tmp_path / VERSION / "token")
    (tmp_path / "..data").symlink_to(VERSION)
    file.symlink_to("..data/token")
    before = opened()
    with pytest.raises(AuthenticationError, match=f"the token file {file} cannot be read: "):
        find_token(None, {"ZCACTOR_TOKEN_FILE": str(file)})
    assert opened() <= before


# ---- making one


def test_made(tmp_path: Path) -> None:
    path = tmp_path / "new" / "zcactor" / "token"
    token = make_token_file(path)
    assert len(token) == TOKEN_NBYTES
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert path.read_text() == token.hex() + "\n"
    assert read_token_file(path) == token
    assert make_token_file(tmp_path / "other") != token
    assert [found.name for found in path.parent.iterdir()] == ["token"]


def test_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_token_file(tmp_path / "zcactor" / "token")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "zcactor" / "token").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "zcactor").stat().st_mode) == 0o700


def test_never_overwritten(file: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    for path in (file, link):
        with pytest.raises(FileExistsError):
            make_token_file(path)
    assert file.read_text() == ONE + "\n"
    assert not (tmp_path / "elsewhere").exists()
    assert sorted(found.name for found in tmp_path.iterdir()) == ["link", "token"]


def test_two_at_once_make_one(tmp_path: Path) -> None:
    for turn in range(20):
        path = tmp_path / str(turn) / "token"
        together = threading.Barrier(4)
        made: list[bytes] = []
        late: list[FileExistsError] = []

        def make(path: Path = path, together: threading.Barrier = together) -> None:
            together.wait()
            try:
                made.append(make_token_file(path))  # noqa: B023
            except FileExistsError as error:
                late.append(error)  # noqa: B023

        threads = [threading.Thread(target=make) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(made), len(late)) == (1, 3)
        assert read_token_file(path) == made[0]
        assert list(path.parent.iterdir()) == [path]
