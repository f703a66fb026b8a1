"""The bindings against a kernel's verbs driver: the contract that the fake device passes, in a guest with soft-RoCE."""

from __future__ import annotations

import importlib.util
import re
import sys

import pytest

from tests.vm.test_harness import ROOT, needs_guest
from tools import vm

pytestmark = needs_guest

LIMIT = 420
"""Seconds: a watchdog, the emulated guest takes 80 for a binding."""


@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize("binding", ["pyverbs", "ibverbs"])
def test_a_binding_keeps_the_contract(binding: str) -> None:
    if binding == "ibverbs" and importlib.util.find_spec("ibverbs") is None:
        pytest.skip("ibverbs is not installed: pip install 'zcactor[rdma]'")
    test = f"tests/transport/verbs/test_{binding}_adapter.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "120", test]
    result = vm.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, timeout=LIMIT)
    if binding == "pyverbs" and "pyverbs is not installed" in result.output:
        pytest.skip("Debian's pyverbs is for another CPython than this one")
    assert result.status == 0, result.output
    summary = re.search(r"(\d+) passed", result.output)
    assert summary is not None and int(summary[1]) > 50, result.output
    assert "skipped" not in result.output.splitlines()[-1], result.output
