"""The state tables: every (state, event) pair, legal or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from itertools import product
from typing import Any

import pytest

from zcactor.errors import ProtocolError
from zcactor.rpc.protocol import (
    CALL_TRANSITIONS,
    OBJECT_TRANSITIONS,
    STREAM_TRANSITIONS,
    CallEvent,
    CallState,
    ObjectEvent,
    ObjectState,
    StreamEvent,
    StreamState,
    advance_call,
    advance_object,
    advance_stream,
)

TABLES = [
    pytest.param(CallState, CallEvent, CALL_TRANSITIONS, advance_call, {CallEvent.RESPONSE}, id="call"),
    pytest.param(
        StreamState,
        StreamEvent,
        STREAM_TRANSITIONS,
        advance_stream,
        {StreamEvent.ITEM, StreamEvent.RESPONSE},
        id="stream",
    ),
    pytest.param(ObjectState, ObjectEvent, OBJECT_TRANSITIONS, advance_object, {ObjectEvent.LAST_LEASE}, id="object"),
]


@pytest.mark.parametrize(("states", "events", "table", "advance", "from_peer"), TABLES)
def test_every_pair(
    states: type[IntEnum],
    events: type[IntEnum],
    table: Mapping[tuple[IntEnum, IntEnum], IntEnum],
    advance: Callable[[Any, Any], IntEnum],
    from_peer: set[IntEnum],
) -> None:
    for state, event in product(states, events):
        if (state, event) in table:
            assert advance(state, event) is table[state, event]
        else:
            error = ProtocolError if event in from_peer else RuntimeError
            with pytest.raises(error, match=f"{event.name} is not legal for .* in state {state.name}"):
                advance(state, event)


def test_call_that_is_answered() -> None:
    state = CallState.QUEUED
    for event in (CallEvent.CREDIT, CallEvent.RESPONSE):
        state = advance_call(state, event)
    assert state is CallState.DONE


def test_cancelled_call_is_done_only_when_answered() -> None:
    state = advance_call(advance_call(CallState.QUEUED, CallEvent.CREDIT), CallEvent.CANCEL)
    assert state is CallState.CANCELLING
    assert advance_call(state, CallEvent.RESPONSE) is CallState.DONE


def test_queued_call_is_cancelled_at_once() -> None:
    assert advance_call(CallState.QUEUED, CallEvent.CANCEL) is CallState.DONE


@pytest.mark.parametrize("state", CallState)
def test_lost_connection_ends_every_call(state: CallState) -> None:
    assert advance_call(state, CallEvent.LOST) is CallState.DONE


@pytest.mark.parametrize("state", StreamState)
def test_lost_connection_ends_every_stream(state: StreamState) -> None:
    assert advance_stream(state, StreamEvent.LOST) is StreamState.DONE


def test_second_response_is_the_peers_fault() -> None:
    with pytest.raises(ProtocolError, match="legal there: CANCEL, LOST"):
        advance_call(CallState.DONE, CallEvent.RESPONSE)


def test_release_of_a_free_object_is_the_peers_fault() -> None:
    with pytest.raises(ProtocolError, match="legal there: none"):
        advance_object(ObjectState.FREE, ObjectEvent.LAST_LEASE)
