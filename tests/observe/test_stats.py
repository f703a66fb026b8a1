"""The counts of a process, as one frozen object."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace

import msgspec
import pytest

from zcactor.objectstore.copies import CopyCount
from zcactor.observe.stats import Stats

SAMPLE = Stats(
    calls=1, frames_sent=2, frames_received=3, bytes_eager=4, bytes_mapped=5, bytes_read=6, bytes_received=7,
    bytes_authenticated=3,
    bytes_copied=30, copies={"a": CopyCount(1, 10), "b": CopyCount(2, 20)}, store_used=8, store_capacity=9, leases=10,
    registrations=11, objects_adopted=3, placements=13, connections=12, pushes=14, collectives=15, bytes_reduced=16,
    bytes_device_mapped=17, device_used=18, device_leases=19, device_extents=20, device_syncs=21,
    bytes_device_pulled=22,
)  # fmt: skip


def test_there_and_back() -> None:
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(SAMPLE.plain()))
    assert Stats.from_plain(plain) == SAMPLE
    assert set(plain) == {field.name for field in fields(Stats)}


def test_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        SAMPLE.calls = 2  # type: ignore[misc]


def test_a_notebook_shows_what_is_not_0() -> None:
    shown = replace(SAMPLE, calls=1_234, leases=0)._repr_html_()
    assert "<tr><td>calls</td><td>1,234</td></tr>" in shown and "leases</td>" not in shown.replace("device_leases", "")
    assert "<tr><td>copies: b</td><td>2 of 20 bytes</td></tr>" in shown
