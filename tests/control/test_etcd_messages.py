"""The answers of etcd's gateway, and what goes into one transaction."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conformance.head_log import ONE
from zcactor.control.etcd_messages import EtcdKeys, EtcdRefused, EtcdSilent, answer_of, merged
from zcactor.control.head_log import MAX_CHANGES, MAX_NBYTES, Change, LogUnusable, applied

KEYS = EtcdKeys("main", bytes(32))


def of_error(status: int, code: object, message: str) -> tuple[int, bytes]:
    return status, json.dumps({"error": message, "message": message, "code": code}).encode()


def test_an_answer() -> None:
    assert answer_of("h:1", 200, b'{"header":{"revision":"1"}}', "") == {"header": {"revision": "1"}}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (of_error(400, 3, "etcdserver: user name is empty"), "etcd at h:1 asks for a user: set ZCACTOR_ETCD_USER and"),
        (
            of_error(400, 3, "etcdserver: authentication failed, invalid user ID or password"),
            "refuses the password of user 'me'",
        ),
        (of_error(412, 9, "etcdserver: authentication is not enabled"), "has no users, and 'me' is to be one"),
        (of_error(403, 7, "etcdserver: permission denied"), "does not let user 'me' read and write"),
    ],
)
def test_answers_that_need_a_person(answer: tuple[int, bytes], words: str) -> None:
    with pytest.raises(LogUnusable, match=words):
        answer_of("h:1", *answer, "me")


@pytest.mark.parametrize(
    ("answer", "doubt", "unusable"),
    [
        ((404, b"Not Found\n"), False, True),
        ((200, b"<html>"), False, True),
        ((200, b"[1]"), False, True),
        ((502, b"<html>bad gateway"), True, False),
        (of_error(503, 14, "etcdserver: request timed out"), True, False),
        (of_error(500, 13, "transport is closing"), True, False),
        (of_error(429, 8, "etcdserver: too many requests"), True, False),
        ((400, b'{"message": "something else"}'), True, False),
    ],
)
def test_answers_that_are_none(answer: tuple[int, bytes], doubt: bool, unusable: bool) -> None:
    with pytest.raises(EtcdSilent, match="h:1 ") as raised:
        answer_of("h:1", *answer, "")
    assert (raised.value.doubt, raised.value.unusable) == (doubt, unusable)


@pytest.mark.parametrize(
    ("answer", "stale"),
    [
        (of_error(404, 5, "etcdserver: requested lease not found"), False),
        (of_error(429, 8, "etcdserver: mvcc: database space exceeded"), False),
        (of_error(401, 16, "etcdserver: invalid auth token"), True),
        (of_error(400, 3, "etcdserver: revision of auth store is old"), True),
    ],
)
def test_refusals(answer: tuple[int, bytes], stale: bool) -> None:
    with pytest.raises(EtcdRefused) as raised:
        answer_of("h:1", *answer, "me")
    assert raised.value.stale == stale


def test_clusters_have_keys_of_their_own() -> None:
    others = [EtcdKeys("main", bytes([1]) * 32), EtcdKeys("other", bytes(32))]
    assert KEYS.view() == others[0].view() != others[1].view()
    marks = {json.dumps(keys.lead(ONE, 1, 0)["success"][1]["request_put"]["value"]) for keys in (KEYS, *others)}
    assert len(marks) == 3


def test_the_end_of_the_entries() -> None:
    page = KEYS.page(7, None, 0)["success"][0]["request_range"]
    assert page["key"] == "L3pjYWN0b3IvbWFpbi9lbnRyaWVzLw=="
    assert page["range_end"] == "L3pjYWN0b3IvbWFpbi9lbnRyaWVzMA=="


changes = st.builds(
    Change, st.sampled_from(("name", "actor")), st.sampled_from("abcdefgh"), st.none() | st.binary(max_size=4)
)


@given(st.lists(st.lists(changes, max_size=5), min_size=1, max_size=6))
def test_merged_changes_are_those_in_their_order(batches: list[list[Change]]) -> None:
    before = {"name": {"a": b"old", "b": b"old"}}
    count, found = merged(batches)
    assert count == len(batches)
    one_by_one = applied(before, [change for batch in batches for change in batch])
    assert applied(before, [Change(kind, key, value) for (kind, key), value in found.items()]) == one_by_one


def test_as_much_as_a_transaction_takes() -> None:
    batch = [Change("name", f"{number}", b"") for number in range(MAX_CHANGES)]
    assert merged([batch, batch, [Change("name", "x", b"")]])[0] == 2
    large = [Change("recipe", "r", bytes(MAX_NBYTES - 1))]
    assert merged([large, [Change("name", "x", b"")]])[0] == 1
    assert merged([large, large])[0] == 2


def test_entries_of_another_program() -> None:
    with pytest.raises(LogUnusable, match="the key /zcactor/main/head in etcd was written by somebody else"):
        KEYS.leader({"create_revision": "5", "value": "eyJhIjoxfQ=="})
