"""`tools/signs.py`: each sign is counted once where it stands, and nothing else is counted."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tools.signs import ATTRIBUTES, main, signs

MANY = "\n".join(f"        self.a{number} = {number}" for number in range(ATTRIBUTES + 1))
FILES = {
    "__init__.py": "",
    "one.py": f"""
        from typing import Any, Protocol
        from collections.abc import Callable

        from package import two

        class Seen(Protocol):
            def look(self) -> Any: ...

        class Large:
            def __init__(self, call: Callable[[], None], *, other: Callable[[int], str] | None, plain: int) -> None:
                self.on_end: Callable[[], None] = lambda: None
{textwrap.indent(MANY, "        ")}

        def is_local(connection: Seen) -> bool:
            return connection.kind == "local" or connection.kind in ("tcp", "verbs") or connection.kind == "other"
        """,
    "two.py": "VALUE = 1",
    "marshal/__init__.py": "from typing import Any\nvalue: Any = 1",
}


def written(folder: Path) -> Path:
    for name, text in FILES.items():
        path = folder / "package" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return folder / "package"


def test_each_sign(tmp_path: Path) -> None:
    assert signs(written(tmp_path)) == {
        "modules": 4,
        "modules that one sibling alone imports": 1,
        "classes": 2,
        "Protocols": 1,
        f"classes that set more than {ATTRIBUTES} attributes": 1,
        "callable parameters of constructors": 2,
        "attributes that begin as a function that does nothing": 1,
        "Any outside of marshal": 1,
        "comparisons of a transport's kind": 2,
    }


def test_the_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(written(tmp_path))]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "     4  modules"
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "there is no Python file" in capsys.readouterr().err
