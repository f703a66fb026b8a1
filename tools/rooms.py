"""Move modules of the package, and their tests, from one room to another, and rewrite all references to them.

::

    python tools/rooms.py                       # moves the modules in `MOVES`; the working tree must be clean
    python tools/rooms.py --table               # prints the table, for the message of the commit
    python tools/rooms.py --rewrite PATH ...    # rewrites names in these files alone, which were written before a move

Each moved module is renamed with ``git mv``, and so is the test that mirrors it. Imports, dotted names and paths are
rewritten in all files that git knows. Nothing else changes, so ``git blame`` can leave the commit out.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path
from typing import Final

__all__ = ["MOVES", "NAMES", "main", "renamed", "rewritten"]

ROOT: Final = Path(__file__).parents[1]
_ROOMS: Final = {
    "transport": "select:selector delivering:base_connection",
    "transport.stream": "aes auth:handshake endpoints:endpoint framing greeting:handshake_io identify:probe listener"
    " sealing:record_layer sendbuffer:send_buffer stream_connection:connection tls",
    "transport.local": "local:endpoint local_connection:connection unix",
    "transport.tcp": "tcp:endpoint tcp_connection:connection tcp_data:data tcp_pull:pull tcp_sealed:authenticated"
    " tcp_serve:serve tls_connection crew liveness waiting",
    "transport.loopback": "loopback:endpoint loopback_connection:connection",
    "transport.verbs.driver": "adapter base checks codes fake fake_nic fake_queues faults ibverbs_adapter"
    " ledger:device_resources load:bindings presence pyverbs_adapter sysfs",
    "transport.verbs.device": "bounce engine events extents:registration_cache itself:self_loopback"
    " seals:versions sizing slots viability",
    "transport.verbs.peer": "bootstrap bulk connection inbox joining:connect link meeting:negotiation pair:queue_pairs"
    " proof pull pulling reaching records sending tagging takedown",
}
"""The modules that move, by their new room; ``old:new`` for a module whose name changes as well."""
_ABOUT: Final = {
    "stream": "Frames in streams of bytes: sockets, the handshake, and the records that frames are encrypted in.",
    "local": "Peers on this host: a unix socket for frames, and each arena mapped by its peers.",
    "tcp": "Peers on any host: a TCP socket for frames, and further ones for the bytes of arrays.",
    "loopback": "Connections inside one process.",
    "driver": "Verbs behind a small interface of our own: the bindings of libibverbs, and a fabric without hardware.",
    "device": "The device of a process: what all connections share, and what there is room for.",
    "peer": "One peer by RDMA: how two processes come to a connection, and what goes through it.",
}
"""The docstring of each room."""


def _old_room(room: str) -> str:
    """The folder in which the modules of a room are before they move."""
    return "transport.verbs" if room.startswith("transport.verbs") else "transport"


MOVES: Final = {
    f"zcactor.{_old_room(room)}.{old}": f"zcactor.{room}.{new or old}"
    for room, modules in _ROOMS.items()
    for old, _, new in (module.partition(":") for module in modules.split())
}
"""Dotted names of modules, old and new."""
_MOVED_BEFORE: Final = {"zcactor.marshal.sealed": "zcactor.marshal.packed"}
"""Modules that have moved by hand; `rewritten` knows them as well."""
_PACKED: Final = {"argument", "array", "failure", "groups", "handle", "moved", "ref", "resolved", "scalar"}
NAMES: Final = {
    **{f"lower_{noun}": f"pack_{noun}" for noun in _PACKED},
    **{f"lift_{noun}": f"unpack_{noun}" for noun in _PACKED - {"array", "groups", "moved", "resolved"}},
    "lifts": "unpackers", "Delivering": "BaseConnection", "Nodes": "NodeTable", "Sealed": "Packed",
}  # fmt: skip
"""Classes and functions that have been renamed, old and new."""
_TEXTS: Final = {".py", ".pyi", ".md", ".toml", ".c", ".h", ".fbs", ""}
_LEFT: Final = {"tools/rooms.py", "CHANGELOG.md", "LICENSE"}


def _test_moves() -> dict[str, str]:
    """The moves of modules under ``tests``: dotted names, old and new."""
    moves: dict[str, str] = {}
    for old, new in MOVES.items():
        *folders, name = old.split(".")[1:]
        *rooms, named = new.split(".")[1:]
        moves[".".join(["tests", *folders, f"test_{name}"])] = ".".join(["tests", *rooms, f"test_{named}"])
    return moves


def _either(names: list[str]) -> str:
    return "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))


def _path(name: str) -> str:
    return name.replace(".", "/") + ".py"


def rewritten(text: str, moves: dict[str, str]) -> str:
    """`text` with the new names and paths of modules, and with imports ``from folder import module`` of them.

    Text that has the new names already is left as it is.

    Args:
        text: the text of a source file or a page.
        moves: dotted names of modules, old and new.
    """

    def dotted(found: re.Match[str]) -> str:
        old, rest = found[1], text[found.end() :]
        below = [new.removeprefix(f"{old}.") for new in moves.values() if new.startswith(f"{old}.")]
        ends = r"\.| import " if text.endswith("from ", 0, found.start()) else r"\."
        if below and not re.match(rf"(?:{ends})(?!(?:{_either(below)})\b)", rest):
            return old  # the folder that the module's name means now, or a module in it
        return moves[old]

    text = re.sub(rf"(?<![\w./])({_either(list(moves))})(?![\w/])", dotted, text)
    paths = {_path(old): _path(new) for old, new in moves.items()}
    paths |= {old.partition("/")[2]: new.partition("/")[2] for old, new in paths.items()}
    text = re.sub(rf"(?<![\w/])({_either(list(paths))})(?=i?\b)", lambda found: paths[found[1]], text)
    for old, new in moves.items():
        text = _imported(text, *old.rpartition(".")[::2], *new.rpartition(".")[::2])
    return text


def _imported(text: str, folder: str, name: str, room: str, named: str) -> str:
    """`text` with ``from folder import name`` as ``from room import named``, and `named` in the place of `name`."""
    start = rf"from {re.escape(folder)} import "
    text = re.sub(rf"{start}{name}(?= as |;|\\n)", f"from {room} import {named}", text)
    line = re.compile(rf"^( *)({start})((?:\w+, )*{name}(?:, \w+)*)$", re.MULTILINE)
    found = line.search(text)
    if found is None:
        return text
    taken = named != name and re.search(rf"(?<![\w.]){named}(?!\w)", text) is not None
    lines = [f"{found[1]}from {room} import {named} as {name}" if taken else f"{found[1]}from {room} import {named}"]
    others = [each for each in found[3].split(", ") if each != name]
    if others:
        lines.insert(0, f"{found[1]}from {folder} import {', '.join(others)}")
    text = text[: found.start()] + "\n".join(lines) + text[found.end() :]
    return text if taken or named == name else _each_token(text, name, named)


def _each_token(text: str, name: str, named: str) -> str:
    """Python source with `named` in the place of `name` where that is a module that something is taken of or set in."""
    lines = text.splitlines(keepends=True)
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    for before, token, after in reversed(list(zip(tokens, tokens[1:], tokens[2:], strict=False))):
        if token.type == tokenize.NAME and token.string == name and before.string != "." and after.string in {".", ","}:
            row, start = token.start
            line = lines[row - 1]
            lines[row - 1] = line[:start] + named + line[start + len(name) :]
    return "".join(lines)


def renamed(text: str, python: bool) -> str:
    """`text` with the new names of classes and functions, `NAMES`: in code, in texts between quotes or backticks.

    Args:
        text: the text of a source file or a page.
        python: whether it is Python source.
    """
    quoted = re.compile(rf"(?<=`)({_either(list(NAMES))})(?=[`.(])|(?<=\")({_either(list(NAMES))})(?=\")")
    text = quoted.sub(lambda found: NAMES[found[0]], text)
    if not python:
        return text
    lines = text.splitlines(keepends=True)
    for token in reversed(list(tokenize.generate_tokens(io.StringIO(text).readline))):
        if token.type == tokenize.NAME and token.string in NAMES:
            row, start = token.start
            line = lines[row - 1]
            lines[row - 1] = line[:start] + NAMES[token.string] + line[token.end[1] :]
    return "".join(lines)


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def _rewrite(paths: list[Path], moves: dict[str, str], *, names: bool) -> None:
    for path in paths:
        text = path.read_text("utf-8")
        new = rewritten(text, moves)
        if names:
            new = renamed(new, path.suffix in {".py", ".pyi"})
        if new != text:
            path.write_text(new, "utf-8")


def _move(moves: dict[str, str]) -> None:
    there = {old: new for old, new in moves.items() if (ROOT / _path(old)).exists()}
    waiting = ROOT / "moving"  # a module may become a folder of its own name
    waiting.mkdir()
    for number, old in enumerate(there):
        _git("mv", _path(old), f"moving/{number}.py")
    for number, new in enumerate(there.values()):
        target = ROOT / _path(new)
        target.parent.mkdir(exist_ok=True, parents=True)
        init = target.parent / "__init__.py"
        if not init.exists() and "tests" not in target.relative_to(ROOT).parts:
            init.write_text(f'"""{_ABOUT[target.parent.name]}"""\n')
            _git("add", str(init))
        _git("mv", f"moving/{number}.py", str(target))
    waiting.rmdir()


def main(arguments: list[str] | None = None) -> int:
    """Print the table, move the modules, or rewrite some files. Returns the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    moves = MOVES | _MOVED_BEFORE | _test_moves()
    if given == ["--table"]:
        print("\n".join(f"{old} -> {new}" for old, new in MOVES.items() if old != new))
        return 0
    if given[:1] == ["--rewrite"]:
        _rewrite([Path(name) for name in given[1:]], moves, names=True)
        return 0
    if given:
        print(f"unknown: {' '.join(given)}; there are --table and --rewrite PATH ...", file=sys.stderr)
        return 2
    if _git("status", "--porcelain", "--untracked-files=no"):
        print("the working tree has changes: commit them first", file=sys.stderr)
        return 1
    known = [ROOT / name for name in _git("ls-files").splitlines() if name not in _LEFT and "_fbs" not in name]
    _rewrite([path for path in known if path.suffix in _TEXTS and not path.is_symlink()], moves, names=False)
    _move(moves)
    return 0


if __name__ == "__main__":
    sys.exit(main())
