"""The table of exports, whose entries end with the last reference to each."""

from __future__ import annotations

import gc

import pytest

from zcactor.objects.promises import Exports


class Thing:
    """Something that is exported."""


def test_an_export_is_found_for_as_long_as_something_keeps_it() -> None:
    exports = Exports()
    thing = Thing()
    exports[7] = thing
    assert exports[7] is thing and exports.get(7) is thing
    assert list(exports) == [7] and len(exports) == 1 and 7 in exports
    enabled = gc.isenabled()
    gc.disable()
    try:
        del thing
        assert exports.get(7) is None and not list(exports) and len(exports) == 0
    finally:
        if enabled:
            gc.enable()
    with pytest.raises(KeyError):
        exports[7]


def test_the_end_of_a_former_holder_leaves_the_next_one() -> None:
    exports = Exports()
    former, following = Thing(), Thing()
    exports[7] = former
    exports[7] = following
    del former
    assert exports[7] is following
    del exports[7]
    assert 7 not in exports
    del following
    assert not exports


def test_a_holder_that_ends_while_it_is_looked_up_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    exports = Exports()
    thing = Thing()
    exports[7] = thing
    monkeypatch.setattr(exports, "_exports", dict(exports._exports))  # of which nothing goes by itself
    del thing
    with pytest.raises(KeyError):
        exports[7]
