"""Questions to ``scontrol``, which a script plays here."""

from __future__ import annotations

from pathlib import Path

import pytest

from zcactor.cluster.slurm import address_in_slurm, hosts_of, job_state
from zcactor.errors import ConnectionLost

SCRIPT = """#!/bin/sh
case "$*" in
    "show hostnames n[1-3]") printf 'n1\\nn2\\nn3\\n';;
    "show node -o n1") echo "NodeName=n1 Arch=x86_64 NodeAddr=10.0.0.1 NodeHostName=n1 Comment=a=b";;
    "show node -o n2") echo "NodeName=n2 Arch=x86_64";;
    "show job -o 7") echo "JobId=7 JobName=x=y JobState=PENDING Reason=Resources Dependency=(null) ExitCode=0:0";;
    *) echo "Node $4 not found" >&2; exit 1;;
esac
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "scontrol").write_text(SCRIPT)
    (tmp_path / "scontrol").chmod(0o755)
    return {"PATH": f"{tmp_path}:/usr/bin:/bin"}


def test_hosts(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    monkeypatch.setenv("PATH", environ["PATH"])
    assert hosts_of("n[1-3]", environ) == ["n1", "n2", "n3"]
    assert hosts_of("n1,m7", {}) == ["n1", "m7"]
    with pytest.raises(ConnectionLost, match="scontrol show hostnames .* failed: Node"):
        hosts_of("n[", environ)


def test_addresses(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    monkeypatch.setenv("PATH", environ["PATH"])
    assert address_in_slurm("n1", environ) == "10.0.0.1"
    with pytest.raises(ConnectionLost, match="does not say at which address n2 is"):
        address_in_slurm("n2", environ)
    with pytest.raises(ConnectionLost, match="failed: Node n9 not found"):
        address_in_slurm("n9", environ)


def test_the_state_of_a_job(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    monkeypatch.setenv("PATH", environ["PATH"])
    assert job_state("7", environ) == ("PENDING", "Resources")
    with pytest.raises(ConnectionLost, match="scontrol show job -o 8 failed"):
        job_state("8", environ)


def test_without_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConnectionLost, match=r"install Slurm's commands \(slurm-client\)"):
        hosts_of("n[1-3]", {"PATH": str(tmp_path)})
