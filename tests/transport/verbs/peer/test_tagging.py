"""Tags of memory that is read by RDMA: both ends make equal ones, and a key never sees a nonce twice."""

from __future__ import annotations

import pytest

from tests.transport.verbs.parts import Memory
from zcactor.errors import ForkedProcess
from zcactor.transport.stream.record_layer import Exporter
from zcactor.transport.verbs.peer import tagging
from zcactor.transport.verbs.peer.tagging import CHUNK_NBYTES, REACH_NBYTES, ReadTags, tags_nbytes

SECRET = bytes(range(32))


def ends() -> tuple[ReadTags, ReadTags]:
    return ReadTags(Exporter(SECRET), leads=True), ReadTags(Exporter(SECRET), leads=False)


def test_both_ends_make_the_same_tags() -> None:
    memory = Memory(CHUNK_NBYTES + 5)
    left, right = ends()
    for nbytes in (1, 4096, CHUNK_NBYTES, CHUNK_NBYTES + 5):
        for owner, reader in ((left, right), (right, left)):
            first = owner.begin(nbytes)
            made = owner.of_ours(first, 7, 4096, memory.address, nbytes)
            assert len(made) == tags_nbytes(nbytes) == 16 * (1 + (nbytes > CHUNK_NBYTES))
            assert reader.of_theirs(first, 7, 4096, memory.address, nbytes) == made
            assert owner.of_theirs(first, 7, 4096, memory.address, nbytes) != made, "a key for each direction"


def test_tags_depend_on_each_bit_and_on_what_they_are_of() -> None:
    memory = Memory(64)
    owner, reader = ends()
    made = owner.of_ours(owner.begin(64), 7, 4096, memory.address, 64)
    for at in range(64):
        memory.bytes[at] ^= 1 << at % 8
        assert reader.of_theirs(0, 7, 4096, memory.address, 64) != made
        memory.bytes[at] ^= 1 << at % 8
    for place in ((1, 7, 4096), (0, 8, 4096), (0, 7, 4097)):
        assert reader.of_theirs(*place, memory.address, 64) != made
    assert reader.of_theirs(0, 7, 4096, memory.address, 63) != made
    other = ReadTags(Exporter(bytes(32)), leads=False)
    assert other.of_theirs(0, 7, 4096, memory.address, 64) != made
    assert reader.of_theirs(0, 7, 4096, memory.address, 64) == made


def test_each_tag_has_a_count_of_its_own() -> None:
    owner, _ = ends()
    counts: list[int] = []
    for nbytes in (1, CHUNK_NBYTES, CHUNK_NBYTES + 1, REACH_NBYTES, 5):
        first = owner.begin(nbytes)
        counts += range(first, first + tags_nbytes(nbytes) // 16)
    assert counts == list(range(1 + 1 + 2 + 128 + 1))


def test_keys_wear_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tagging, "_USES", 3)
    memory = Memory(8)
    owner, reader = ends()
    exporter = owner._exporter
    salts: list[bytes] = []
    keys = exporter.keys

    class Watched:
        def keys(self, salt: bytes, *labels: bytes) -> tuple[bytes, ...]:
            salts.append(salt)
            return keys(salt, *labels)

    owner._exporter = Watched()  # type: ignore[assignment]
    for _ in range(20):
        first = owner.begin(8)
        assert owner.of_ours(first, 1, 0, memory.address, 8) == reader.of_theirs(first, 1, 0, memory.address, 8)
    assert [int.from_bytes(salt, "little") for salt in salts] == [number // 8 for number in range(20)]


def test_a_forked_child_makes_none() -> None:
    owner, _ = ends()
    memory = Memory(8)
    owner._exporter.forget()  # a fork does this to each exporter
    with pytest.raises(ForkedProcess):
        owner.of_ours(0, 1, 0, memory.address, 8)
