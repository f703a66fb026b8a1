"""`zcactor.topology.requirement`: networkx is imported only when a network is made, and its absence is explained."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from zcactor.topology.requirement import networkx

ROOT = Path(__file__).resolve().parents[2]


def test_the_module_is_returned() -> None:
    assert networkx().Graph is not None


@pytest.mark.slow
@pytest.mark.parametrize("program", ["import zcactor", "import zcactor as zc; zc.topology.ring"])
def test_imports_do_not_import_it(program: str) -> None:
    check = f"{program}; import sys; assert 'networkx' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=True, timeout=60)


def test_its_absence_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "networkx", None)
    import zcactor as zc

    with pytest.raises(ImportError, match=r"pip install 'zcactor\[topology\]'"):
        zc.topology.ring(4)
    with pytest.raises(ImportError, match=r"zcactor\[topology\]"):
        zc.topology.Topology.from_file("nowhere.toml")
