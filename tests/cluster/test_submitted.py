"""A task of a submitted job, as a process: its command, the file with the address, and its end."""

from __future__ import annotations

import os
import signal
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.driver.programs import Program, until
from zcactor.cluster import submitted
from zcactor.cluster.rendezvous import Meeting

PATIENCE = 120.0
"""Seconds after which a test stops waiting: a watchdog, no statement about speed."""


def test_a_task_becomes_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    called: list[Any] = []
    monkeypatch.setattr(os, "execv", lambda *arguments: called.append(arguments))
    try:
        submitted.begin("/shared", "key", 4, 60.0)
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR2, before)
    command = [sys.executable, "-m", "zcactor.cluster.submitted", "rank", "/shared", "key", "4", "60.0"]
    assert called == [(sys.executable, command)]


@pytest.mark.slow
def test_a_rank_says_where_the_head_is_until_it_is_told_to_end(tmp_path: Path) -> None:
    argv = (sys.executable, "-m", "zcactor.cluster.submitted", "rank", str(tmp_path), "key", "1", "100")
    # The address is that of the program which has submitted the job.
    env = {"ZCACTOR_ADDRESS": "127.0.0.1:1", "XDG_CONFIG_HOME": str(tmp_path), "ZCACTOR_STORE_CAPACITY": str(1 << 26)}
    meeting = Meeting(tmp_path, "key")
    with Program("", argv=argv, env=env, runtime_dir=True) as program:
        address = until(meeting.look, "the address", PATIENCE)
        assert address.startswith("127.0.0.1:")
        assert address != "127.0.0.1:1"
        assert stat.S_IMODE(meeting.path.stat().st_mode) == 0o600
        program.process.terminate()
        assert program.status(PATIENCE) == 128 + signal.SIGTERM
        program.assert_clean(PATIENCE)


@pytest.mark.slow
def test_a_setting_that_is_wrong(tmp_path: Path) -> None:
    argv = (sys.executable, "-m", "zcactor.cluster.submitted", "rank", str(tmp_path), "key", "1", "100")
    with Program("", argv=argv, env={"ZCACTOR_NUM_CPUS": "many"}) as program:
        assert program.status(PATIENCE) == 1
        assert "zcactor: " in program.stderr()
        assert "ZCACTOR_NUM_CPUS" in program.stderr()
