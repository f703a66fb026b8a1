"""The measure of a graph's edge over RDMA says why it cannot run. `benchmarks.budget_rows` has it run in a guest."""

from __future__ import annotations

import pytest

from benchmarks.graph_rdma import main
from zcactor.transport.verbs.driver.bindings import Absent, bindings


@pytest.mark.skipif(not isinstance(bindings(), Absent), reason="there is a device here")
def test_without_a_device_it_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick"]) == 2
    assert "no RDMA" in capsys.readouterr().err
