"""``CUDA_VISIBLE_DEVICES``, as CUDA reads it."""

from __future__ import annotations

import pytest

from zcactor.device.visible import visible

UUIDS = ["GPU-aaaa-00", "GPU-aaab-01", "GPU-b000-02"]


@pytest.mark.parametrize(
    ("variable", "found"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("2", [2]),
        ("2,0", [2, 0]),
        (" 1 , 2 ", [1, 2]),
        ("0,7,1", [0]),
        ("0,x,1", [0]),
        ("1,1", []),
        ("GPU-b", [2]),
        ("GPU-b000-02,GPU-aaaa", [2, 0]),
        ("GPU-aaa", []),
        ("GPU-b,2", []),
        ("NoDevFiles", []),
        ("b000", []),
        ("²", []),
    ],
)
def test_visible(variable: str | None, found: list[int]) -> None:
    assert visible(UUIDS, variable) == found
