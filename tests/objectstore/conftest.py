"""The store that the tests of the heap share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.objectstore.heap_arrays import MIB, PROCESS
from zcactor.objectstore.store import Store


@pytest.fixture
def store() -> Iterator[Store]:
    """An empty store of 64 MiB."""
    made = Store(64 * MIB, PROCESS, extent_nbytes=4 * MIB)
    yield made
    made.close()
