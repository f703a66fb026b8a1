"""`tools/rooms.py`: references to moved modules and renamed classes are rewritten, and all other text stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.rooms import MOVES, NAMES, main, renamed, rewritten

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("from zcactor.transport.auth import Purpose", "from zcactor.transport.stream.handshake import Purpose"),
        ("from zcactor.transport.tcp import TcpEndpoint", "from zcactor.transport.tcp.endpoint import TcpEndpoint"),
        ("see `zcactor.transport.tcp_data.PATIENCE`.", "see `zcactor.transport.tcp.data.PATIENCE`."),
        ("see `zcactor.transport.tcp.TIMEOUT`.", "see `zcactor.transport.tcp.endpoint.TIMEOUT`."),
        ("import zcactor.transport.verbs.load", "import zcactor.transport.verbs.driver.bindings"),
        (
            "`zcactor/transport/base.py`, `transport/auth.py`",
            "`zcactor/transport/base.py`, `transport/stream/handshake.py`",
        ),
        (
            "from zcactor.transport import greeting\n\ngreeting.introduce(a)\nself.greeting.end()\n",
            "from zcactor.transport.stream import handshake_io\n\nhandshake_io.introduce(a)\nself.greeting.end()\n",
        ),
        (
            "from zcactor.transport import tcp_data\n\ndata = tcp_data.Channel(sock)\n",
            "from zcactor.transport.tcp import data as tcp_data\n\ndata = tcp_data.Channel(sock)\n",
        ),
        (
            "    from zcactor.transport import crew, select, version\n",
            "    from zcactor.transport import version\n"
            "    from zcactor.transport.tcp import crew\n"
            "    from zcactor.transport import selector\n",
        ),
        ("from zcactor.transport import listener as door", "from zcactor.transport.stream import listener as door"),
    ],
)
def test_references_to_moved_modules(old: str, new: str) -> None:
    assert rewritten(old, MOVES) == new
    assert rewritten(new, MOVES) == new


@pytest.mark.parametrize(
    "text",
    [
        'containers = ["zcactor.transport.tcp"]',
        "from zcactor.transport.tcp import pull",
        "zcactor.transport.stream and zcactor.transport.tcp import each other",
        "import zcactor.transport.tcp.connection",
        "from zcactor.transport.base import Endpoint",
        "zcactor.transport.authority",
        "the greeting, and what follows",
    ],
)
def test_text_that_names_no_moved_module(text: str) -> None:
    assert rewritten(text, MOVES) == text


def test_renamed_classes() -> None:
    source = 'class Nodes(Delivering):\n    """Nodes that `Sealed` values go to."""\n\n__all__ = ["Nodes"]\n'
    assert renamed(source, python=True) == (
        'class NodeTable(BaseConnection):\n    """Nodes that `Packed` values go to."""\n\n__all__ = ["NodeTable"]\n'
    )
    assert renamed("Nodes have `lower_ref` and `Nodes`.", python=False) == "Nodes have `pack_ref` and `NodeTable`."


def test_files_are_rewritten_once(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text("from zcactor.transport.delivering import Delivering\n\n\nclass Mine(Delivering):\n    pass\n")
    for _ in range(2):
        assert main(["--rewrite", str(path)]) == 0
        assert path.read_text() == (
            "from zcactor.transport.base_connection import BaseConnection\n\n\nclass Mine(BaseConnection):\n    pass\n"
        )


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--table"]) == 0
    assert "zcactor.transport.auth -> zcactor.transport.stream.handshake" in capsys.readouterr().out.splitlines()


def test_unknown_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tabel"]) == 2
    assert "--tabel" in capsys.readouterr().err


def test_new_names_are_those_of_the_package() -> None:
    assert [new for new in MOVES.values() if not (ROOT / (new.replace(".", "/") + ".py")).is_file()] == []
    text = "\n".join(path.read_text() for path in (ROOT / "zcactor").rglob("*.py"))
    assert [name for name in NAMES.values() if name not in text] == []
