"""`zcactor.folders`: where the user's files are, and the sentences where there is no such place."""

from __future__ import annotations

import os
import pwd
import re
import stat
from pathlib import Path

import pytest

from zcactor.config import Config, load_config
from zcactor.errors import AuthenticationError
from zcactor.folders import NoFolder, expanded, is_there, make_folder, user_folder, writing
from zcactor.token import default_file, find_token


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user whom the system does not know, as in a container that runs under any number."""

    def unknown(number: int) -> pwd.struct_passwd:
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.mark.parametrize(
    ("environ", "path"),
    [
        ({"XDG_STATE_HOME": "/state", "HOME": "/home/me"}, "/state/zcactor"),
        ({"XDG_STATE_HOME": "", "HOME": "/home/me"}, "/home/me/.local/state/zcactor"),
        ({"XDG_STATE_HOME": "state", "HOME": "/home/me"}, "/home/me/.local/state/zcactor"),
        ({"HOME": "/"}, "/.local/state/zcactor"),
        ({"HOME": "~"}, f"{pwd.getpwuid(os.getuid()).pw_dir}/.local/state/zcactor"),
        ({}, f"{pwd.getpwuid(os.getuid()).pw_dir}/.local/state/zcactor"),
    ],
)
def test_the_folder_of_a_user(environ: dict[str, str], path: str) -> None:
    assert str(user_folder("state", environ)) == path


@pytest.mark.usefixtures("homeless")
@pytest.mark.parametrize("home", [{}, {"HOME": ""}, {"HOME": "~"}, {"HOME": "relative"}])
def test_a_user_without_a_home_has_defaults_and_a_sentence(
    home: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config(environ=home)[0] == Config()
    assert find_token(None, home) is None
    sentence = rf"HOME is not set .* user {os.getuid()} has no entry .* set XDG_STATE_HOME to a folder of yours"
    with pytest.raises(NoFolder, match=sentence):
        user_folder("state", home)
    with pytest.raises(
        AuthenticationError, match="no place for the token: HOME .* set XDG_CONFIG_HOME .*ZCACTOR_TOKEN"
    ):
        default_file(home)
    with pytest.raises(NoFolder, match="HOME is not set"):
        expanded("~/tls", home)
    assert list(tmp_path.iterdir()) == []


def test_paths_with_a_tilde() -> None:
    environ = {"HOME": "/home/me"}
    root = pwd.getpwnam("root").pw_dir
    found = [str(expanded(path, environ)) for path in ("~", "~/a/b", "/a/~", "~root", "~root/x")]
    assert found == ["/home/me", "/home/me/a/b", "/a/~", root, f"{root}/x"]
    with pytest.raises(NoFolder, match="~nobody-of-that-name/x: there is no user 'nobody-of-that-name'"):
        expanded("~nobody-of-that-name/x", environ)


@pytest.mark.parametrize("umask", [0o022, 0o177, 0o777])
def test_folders_are_the_users_alone_under_any_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        make_folder(tmp_path / "a" / "b")
        make_folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a", tmp_path / "a" / "b")] == [0o700, 0o700]


def test_a_file_in_the_way_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    path = tmp_path / "a" / "b" / "c"
    sentence = f"{path} cannot be written: {tmp_path / 'a'} is a file; do this"
    with pytest.raises(NoFolder, match=f"^{re.escape(sentence)}$"), writing(path, "do this"):
        raise AssertionError
    assert not is_there(path)


def test_the_blocks_own_errors_have_the_remedy(tmp_path: Path) -> None:
    with (
        pytest.raises(NoFolder, match="cannot be written: Is a directory; do this"),
        writing(tmp_path / "x", "do this"),
    ):
        tmp_path.open("w")
    with pytest.raises(FileExistsError), writing(tmp_path / "x", "do this"):
        tmp_path.mkdir()
