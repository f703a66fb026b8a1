"""The options of groups that come from other processes."""

from __future__ import annotations

from typing import Any

import pytest

from zcactor.collectives.group_options import GroupOptions
from zcactor.errors import ProtocolError


def test_options_travel_as_plain_values() -> None:
    options = GroupOptions(True, 2.5)
    assert GroupOptions.from_wire(list(options)) == options


@pytest.mark.parametrize("fields", [None, [], [True], [1, 0.0], [True, 0], [True, 0.0, 0]])
def test_malformed_options_are_refused(fields: Any) -> None:
    with pytest.raises(ProtocolError, match="options of a group are malformed"):
        GroupOptions.from_wire(fields)
