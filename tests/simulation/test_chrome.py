"""The file by which browsers show a trace."""

from __future__ import annotations

import io
import json

from simulation.command import ChromeFile
from simulation.trace import Trace


def test_hosts_and_processes_have_names_and_a_bar_from_birth_to_end() -> None:
    file = io.StringIO()
    chrome = ChromeFile(file)
    trace = Trace(chrome.take)
    trace.note(0.0, "a@h0", "born")
    trace.note(0.5e-3, "b@h1", "born")
    trace.note(0.001, "a@h0", "send", to="b@h1", nbytes=8)
    trace.note(2.0, "a@h0", "end", why="killed")
    chrome.close()
    events = json.loads(file.getvalue())
    names = {(event["pid"], event["tid"], event["args"]["name"]) for event in events if event["ph"] == "M"}
    assert names == {(1, 0, "h0"), (1, 1, "a"), (2, 0, "h1"), (2, 2, "b")}
    rest = [(event["ph"], event["name"], event["ts"], event["pid"], event["tid"]) for event in events
            if event["ph"] != "M"]  # fmt: skip
    assert rest == [
        ("B", "lives", 0.0, 1, 1), ("B", "lives", 500.0, 2, 2), ("i", "send", 1000.0, 1, 1), ("E", "lives", 2e6, 1, 1),
    ]  # fmt: skip
    assert [event["args"] for event in events if event["name"] == "send"] == [{"to": "b@h1", "nbytes": 8}]


def test_a_run_without_events_is_a_file_all_the_same() -> None:
    file = io.StringIO()
    ChromeFile(file).close()
    assert json.loads(file.getvalue()) == []
