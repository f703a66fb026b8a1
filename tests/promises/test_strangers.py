"""What SECURITY.md promises about those without the token: whose bytes are obeyed, and whose become code."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import pytest

from zcactor.assembly.endpoints import make_endpoint
from zcactor.config import FILE_NAME, Config, load_config
from zcactor.objectstore.store import Store

if TYPE_CHECKING:
    from pathlib import Path

STRANGER = 65534


# ---- settings


@pytest.mark.root
@pytest.mark.parametrize("place", ["directory", "user_directory"])
@pytest.mark.parametrize("theirs", ["file", "folder"])
def test_settings_of_another_user_are_not_obeyed(tmp_path: Path, place: str, theirs: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    file = folder / FILE_NAME
    file.write_text('address = "10.0.0.9:7433"\n')
    options: Any = {"directory": tmp_path, "user_directory": tmp_path, place: folder, "environ": {}}
    assert load_config(**options)[0].address == "10.0.0.9:7433"
    owned = file if theirs == "file" else folder
    os.chown(owned, STRANGER, STRANGER)
    with pytest.raises(ValueError, match=f"{file} is not obeyed: the {theirs} {owned} belongs to uid {STRANGER}"):
        load_config(**options)


@pytest.mark.parametrize(("mode", "what"), [(0o666, "file"), (0o1777, "folder"), (0o777, "folder")])
def test_settings_that_others_may_write_are_not_obeyed(tmp_path: Path, mode: int, what: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    file = folder / FILE_NAME
    options: Any = {"directory": folder, "user_directory": tmp_path, "environ": {}}
    changed = file if what == "file" else folder
    folder.chmod(mode if what == "folder" else 0o755)
    assert load_config(**options)[0] == Config(), "no file, so nobody's settings"
    file.write_text("recv_depth = 7\n")
    changed.chmod(mode)
    with pytest.raises(ValueError, match=f"{what} {changed} has mode {mode:04o}: others may write it.*start the prog"):
        load_config(**options)
    changed.chmod(mode & ~0o022)
    assert load_config(**options)[0].recv_depth == 7


@pytest.mark.root
@pytest.mark.parametrize(("gid", "obeyed"), [(0, True), (STRANGER, False)])
def test_a_group_of_the_user_alone_may_write_settings(tmp_path: Path, gid: int, obeyed: bool) -> None:
    file = tmp_path / FILE_NAME
    file.write_text("recv_depth = 7\n")
    os.chown(file, -1, gid)
    file.chmod(0o664)
    options: Any = {"directory": tmp_path, "user_directory": tmp_path / "none", "environ": {}}
    if obeyed:
        assert load_config(**options)[0].recv_depth == 7
        return
    with pytest.raises(ValueError, match="has mode 0664: others may write it"):
        load_config(**options)


# ---- frames on this host


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "10.0.0.1"])
@pytest.mark.parametrize("transports", ["tcp", "verbs,tcp"])
def test_frames_over_tcp_are_sealed_at_every_address(tmp_path: Path, host: str, transports: str) -> None:
    with contextlib.closing(Store(1 << 20, b"s" * 16)) as store:
        made: Any = make_endpoint(Config(host=host, transports=transports), tmp_path, b"p" * 16, bytes(32), store)
        assert all(way._sealing for way in made.ways)
        off = Config(host=host, transports=transports, sealing="off")
        plain: Any = make_endpoint(off, tmp_path, b"p" * 16, bytes(32), store)
        assert not any(way._sealing for way in plain.ways)
