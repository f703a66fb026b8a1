"""Fixtures of the marshalling tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.marshal.wire import Wire
from zcactor.marshal.importable import search_here


@pytest.fixture
def wire() -> Iterator[Wire]:
    """Two marshallers and the wire between them."""
    made = Wire()
    yield made
    made.close()


@pytest.fixture
def restored_imports() -> Iterator[None]:
    """Restore path, modules and finders after the test."""
    import cloudpickle  # noqa: F401 -- imported on first use, and what has been used cannot be taken out again

    path, finders, modules = list(sys.path), list(sys.meta_path), dict(sys.modules)
    yield
    sys.path[:], sys.meta_path[:] = path, finders
    for name in set(sys.modules) - set(modules):
        del sys.modules[name]
    search_here(sys.path)
