"""Walks through the code: each step is there, and leads to the next one."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tools.walks import PAGE, main

FILES = {
    "zcactor/api/counter.py": """
        from zcactor.rpc.wire import Wire, REQUEST


        class Counter:
            def __init__(self, wire, session):
                self._report = session.taken
                self.wire = Wire(wire)

            def add(self, number):
                return self.wire.send(number)

            def over(self, queue):
                queue.put(self._report(REQUEST))
        """,
    "zcactor/rpc/wire.py": """
        from zcactor.rpc.services import remote

        REQUEST = "mul"


        class Wire:
            def __init__(self, send):
                self.send = send


        class Session:
            def __init__(self, hub):
                self.taken = hub.take

            def pending(self, requests):
                return requests.ask(self, Hub.take, REQUEST)


        class Hub:
            @remote(1)
            async def take(self, request):
                assert request == REQUEST
        """,
    "zcactor/native/wire.c": """
        /* Send a number, and not gone(). */
        static PyObject *wire_send(Wire *self, PyObject *number) {
            return put(self, KIND_CALL, number); // and gone()
        }
        int put(Wire *self, int kind, PyObject *number) { return kind; }
        int taken(Wire *self, int kind) {
            if (kind != KIND_CALL) return -1;
            return PyObject_CallOneArg(self->given[TAKER], self->state->str_over);
        }
        static PyMethodDef methods[] = {
            {"send", (PyCFunction)(void (*)(void))wire_send, METH_O, "send(number)"},
            {NULL, NULL, 0, NULL}};
        """,
    PAGE: """
        # Walks

        1. A list before the first walk is none.

        ## The life of a number

        From the call on.

        1. `zcactor/api/counter.py` `Counter.add`: the number is taken.
        2. `zcactor/native/wire.c` `wire_send`: it is written,
           and sent.
        3. `zcactor/native/wire.c` `put`: it is there.
        4. (frame CALL) `zcactor/native/wire.c` `taken`: another process has it.
        5. `zcactor/api/counter.py` `Counter.over`: it is queued.
        6. (by `_report` of `zcactor/api/counter.py` `Counter.__init__`, by `taken` of `zcactor/rpc/wire.py`
           `Session.__init__`) `zcactor/rpc/wire.py` `Hub.take`: it is over.
        7. (meanwhile) `zcactor/rpc/wire.py` `Session.pending`: somebody asks.
        8. (request) `zcactor/rpc/wire.py` `Hub.take`: an answer comes.
        9. (back) `zcactor/rpc/wire.py` `Session.pending`: it is here.
        10. (from 5, by `REQUEST`) `zcactor/rpc/wire.py` `Session.pending`: they share a word.

        ## The life of a counter

        1. `zcactor/api/counter.py` `Counter.__init__`: it is made.
        2. `zcactor/rpc/wire.py` `Wire.__init__`: its wire is made.
        """,
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small package with two walks through it, which hold."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip())
    return tmp_path


def test_walks_hold(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tree)]) == 0
    assert capsys.readouterr().out == "2 walks: each step leads to the next one\n"


def test_walks_counts(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tree), "--counts"]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        "10 steps,  3 files, 3 rooms  The life of a number (api, native, rpc)",
        " 2 steps,  2 files, 2 rooms  The life of a counter (api, rpc)",
    ]


@pytest.mark.parametrize(
    ("name", "old", "new", "told"),
    [
        ("zcactor/api/counter.py", "def add(", "def plus(", "there is no Counter.add in zcactor/api/counter.py"),
        ("zcactor/api/counter.py", "class Counter:", "class Count:", "there is no Counter.add"),
        ("zcactor/api/counter.py", "wire.send(", "wire.tell(", "Counter.add does not name send or wire_send"),
        ("zcactor/native/wire.c", '{"send"', '{"tell"', "Counter.add does not name tell or wire_send"),
        ("zcactor/native/wire.c", "int put(", "int set(", "there is no put in zcactor/native/wire.c"),
        ("zcactor/native/wire.c", "return put(", "return /* put */ set(", "wire_send does not name put"),
        ("zcactor/native/wire.c", "put(self, KIND_CALL", "put(self, KIND_PUSH", "no step before it writes CALL"),
        ("zcactor/native/wire.c", "kind != KIND_CALL", "kind != KIND_PUSH", "taken does not name CALL"),
        ("zcactor/native/wire.c", "str_over", "str_other", "taken does not name over"),
        ("zcactor/api/counter.py", "put(self._report", "put(self._gone", "does not name _report"),
        ("zcactor/api/counter.py", "= session.taken", "= 1", "Counter.__init__ does not name taken"),
        ("zcactor/rpc/wire.py", "= hub.take", "= hub.gone", "Session.__init__ does not name take"),
        ("zcactor/rpc/wire.py", "class Session:", "class Sessions:", "there is no Session.__init__ in zcactor/rpc"),
        ("zcactor/rpc/wire.py", "Hub.take, REQUEST", "Hub.gone, REQUEST", "Session.pending does not name take"),
        ("zcactor/rpc/wire.py", "@remote(1)", "@local(1)", "Hub.take is not declared as remote"),
        ("zcactor/api/counter.py", "_report(REQUEST)", "_report(1)", "Counter.over does not name REQUEST"),
        ("zcactor/api/counter.py", "= Wire(wire)", "= wire", "Counter.__init__ does not name Wire"),
        (PAGE, "wire.c` `put`", "wired.c` `put`", "there is no file zcactor/native/wired.c"),
        (PAGE, "counter.py` `Counter.add", "gone.py` `Counter.add", "there is no file zcactor/api/gone.py"),
        (PAGE, "(from 5,", "(from 11,", "there is no step 11 before it"),
        (PAGE, "(meanwhile)", "(somehow)", "the way 'somehow' is not known"),
    ],
)  # fmt: skip
def test_a_broken_step(
    tree: Path, capsys: pytest.CaptureFixture[str], name: str, old: str, new: str, told: str
) -> None:
    path = tree / name
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    assert main([str(tree)]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"{PAGE}:") and told in out


@pytest.mark.parametrize(
    ("old", "new"), [("3. `zc", "4. `zc"), ("`put`: it is there.", "`put`"), ("`Counter.add`:", "Counter.add:")]
)
def test_a_malformed_step(tree: Path, capsys: pytest.CaptureFixture[str], old: str, new: str) -> None:
    page = tree / PAGE
    page.write_text(page.read_text().replace(old, new, 1))
    assert main([str(tree)]) == 2
    assert "is not of the form" in capsys.readouterr().err


def test_a_missing_page(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / PAGE).unlink()
    assert main([str(tree)]) == 2
    assert PAGE in capsys.readouterr().err
