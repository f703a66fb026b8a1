"""The measures of RDMA run on the fake fabric; their figures there mean nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.rdma import main
from zcactor.transport.verbs.driver.bindings import Absent, bindings


@pytest.mark.slow
def test_pulls_through_the_fake_fabric(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures"
    assert main(["--binding", "fake", "--quick", "--markdown", "--json", str(path)]) == 0
    figures = [json.loads(line) for line in path.read_text().splitlines()]
    assert [figure["name"] for figure in figures] == [f"pull of {n} MiB ({n} READs)" for n in (1, 4, 16)]
    assert all(figure["value"] > 0 and figure["floor"] > 0 for figure in figures)
    output = capsys.readouterr().out
    assert "| pull of 1 MiB (1 READs) |" in output and "of 3 budgets hold" in output


@pytest.mark.skipif(not isinstance(bindings(), Absent), reason="there is a device here")
def test_without_a_device_it_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick"]) == 2
    assert "no RDMA" in capsys.readouterr().err
