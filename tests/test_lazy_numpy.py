"""NumPy, imported where it is first used."""

from __future__ import annotations

import subprocess
import sys

import numpy
import pytest

from zcactor.lazy_numpy import np


def test_it_is_numpy() -> None:
    assert np.ndarray is numpy.ndarray
    assert np.generic is numpy.generic
    assert isinstance(np.empty(2), numpy.ndarray)
    with pytest.raises(AttributeError, match="no attribute 'nothing_of_this_name'"):
        np.nothing_of_this_name  # type: ignore[attr-defined]


WITHOUT = """
import sys
import zcactor
import zcactor.cli.main
from zcactor.lazy_numpy import np

assert "numpy" not in sys.modules
assert not isinstance(1, np.ndarray) and not isinstance(1.0, np.generic) and type(b"") is not np.ndarray
assert "numpy" not in sys.modules
"""

CALLED = """
from zcactor.lazy_numpy import np
made = np.ndarray(3, np.uint8)
import numpy
assert type(made) is numpy.ndarray is np.ndarray and made.shape == (3,)
"""

FOUND = """
from zcactor.lazy_numpy import np
before = np.ndarray
import numpy
assert not isinstance(numpy.empty(0), before)
assert isinstance(numpy.empty(0), np.ndarray) and isinstance(numpy.float32(1), np.generic)
"""

NATIVE = """
import sys
from zcactor.native import hot
try:
    hot.address(b"bytes")
except TypeError as error:
    assert "an array is needed, not bytes" in str(error)
import numpy
assert hot.address(numpy.empty(2)) > 0
"""


@pytest.mark.parametrize("program", [WITHOUT, CALLED, FOUND, NATIVE])
def test_it_is_imported_where_it_is_used(program: str) -> None:
    subprocess.run([sys.executable, "-c", program], check=True)
