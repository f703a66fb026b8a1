"""The trace: its lines, lines that are left out of the file, and the digest of all lines."""

from __future__ import annotations

import hashlib
import json

from simulation.trace import Trace


def test_the_digest_is_that_of_all_lines() -> None:
    lines: list[str] = []
    trace = Trace(lines.append)
    trace.note(0.5, "a@h0", "send", to="b@h1")
    trace.note(1.0, "b@h1", "arrive")
    whole = "".join(line + "\n" for line in lines).encode()
    assert trace.digest == hashlib.blake2b(whole, digest_size=8).hexdigest()
    assert json.loads(lines[0]) == {"t": 0.5, "p": "a@h0", "k": "send", "to": "b@h1"}
    assert [line for _, _, line in trace.latest] == lines


def test_what_is_not_asked_for_is_not_written_and_counts_all_the_same() -> None:
    lines: list[str] = []
    partly, fully = Trace(lines.append, since=1.0, until=2.0, only={"h1", "c@h2"}), Trace()
    for trace in (partly, fully):
        for time, place in ((0.5, "b@h1"), (1.5, "a@h0"), (1.6, "b@h1"), (1.7, "c@h2"), (1.8, "d@h2"), (3.0, "b@h1")):
            trace.note(time, place, "x")
    assert [json.loads(line)["t"] for line in lines] == [1.6, 1.7]
    assert partly.digest == fully.digest
    assert partly.count == 6
