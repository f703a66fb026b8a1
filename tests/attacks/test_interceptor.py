"""The interceptor overwrites each find, in any pieces in which the bytes come, and changes nothing else."""

from __future__ import annotations

import pytest

from tests.attacks.interceptor import Overwriting


@pytest.mark.parametrize("size", range(1, 12))
@pytest.mark.parametrize("put", [b"", b"Z", b"ABC", b"ABCDEF"])
def test_each_find_is_overwritten(size: int, put: bytes) -> None:
    data = b"..abc...abcdef.ab.aabc......."
    way = Overwriting(b"abc", put)
    done = b"".join(way.pass_on(data[at : at + size]) for at in range(0, len(data), size)) + way.rest()
    expected = bytearray(data)
    for at in (2, 8, 19):
        expected[at : at + len(put)] = put
    assert done == expected
    assert way.found == 3
