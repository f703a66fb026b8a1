"""The options of fake GPUs: each value that is allowed, and errors that list all of them."""

from __future__ import annotations

import pytest

from zcactor.device.fake.options import FakeOptions

CALLS = frozenset({"copy", "create"})


def test_the_defaults() -> None:
    assert FakeOptions.parse("", CALLS) == FakeOptions()
    assert FakeOptions() == FakeOptions(
        1, 1 << 30, 0.0, 0, "all", "vmm", "ipc", True, True, True, "", 1, 0.0, "", 0, False, 0.0
    )


def test_all_of_them() -> None:
    text = (
        "devices=16, memory=3MiB,late=2.5,seed=-7,peer=none,export=none,events=none,readonly=no,dmabuf=no,waits=no,"
        "fail=create!:3,refuse=0.25,host=one-2,context=300MiB,captures=0.5"
    )
    assert FakeOptions.parse(text, CALLS) == FakeOptions(
        16,
        3 << 20,
        2.5,
        -7,
        "none",
        "none",
        "none",
        False,
        False,
        False,
        "create",
        3,
        0.25,
        "one-2",
        300 << 20,
        True,
        0.5,
    )


@pytest.mark.parametrize(
    ("text", "value"), [("4096", 4096), ("4KiB", 4096), ("2GiB", 2 << 30)], ids=["bytes", "KiB", "GiB"]
)
def test_memory(text: str, value: int) -> None:
    assert FakeOptions.parse(f"memory={text}", CALLS).memory == value


def test_failures() -> None:
    assert FakeOptions.parse("fail=", CALLS).fail == ""
    assert FakeOptions.parse("fail=copy", CALLS).fail_at == 1
    assert FakeOptions.parse("fail=copy:2", CALLS).breaks_at == 0
    assert FakeOptions.parse("fail=fatal:2", CALLS).breaks_at == 2


@pytest.mark.parametrize(
    "text",
    [
        "nonsense=1", "devices", "devices=0", "devices=17", "devices=x", "devices=1,devices=2", "memory=0",
        "memory=1TiB", "memory=-1", "late=-1", "late=x", "late=nan", "seed=1.5", "peer=some", "export=fd",
        "events=yes", "readonly=maybe", "dmabuf=1", "waits=", "fail=drive", "fail=copy:0", "fail=copy:", "fail=copy:x",
        "devices=²", "refuse=1", "refuse=-0.1", "refuse=0.91", "refuse=yes", "captures=1",
        "host=a/b", "host=a b", f"host={'a' * 33}", "context=-1", "context=x", "fail=!", "fail=copy!!", "fail=copy:1!",
    ],
)  # fmt: skip
def test_malformed_options(text: str) -> None:
    with pytest.raises(ValueError, match="the fake GPU does not know the option") as caught:
        FakeOptions.parse(text, CALLS)
    said = str(caught.value)
    assert all(f"\n  {name}=" in said for name in FakeOptions.__slots__ if name not in {"fail_at", "breaks"})
    assert "copy, create" in said
