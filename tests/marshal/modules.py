"""Modules made from files, in the way in which pytest makes them with --import-mode=importlib."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

SOURCE = """
class Thing:
    pass
def work():
    return Thing
"""


def load(name: str, file: Path, source: str = SOURCE) -> ModuleType:
    """Write `source` to `file` and make it module `name` of this process."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
