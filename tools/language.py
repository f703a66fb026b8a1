"""Refuse phrases in docstrings and comments that make readers guess; ``make lint`` runs this program.

::

    python tools/language.py [PATH ...]     # files or folders; by default all sources of this repository

`REFUSED` lists the patterns, each with what to write instead. The first line of a docstring is looked at more closely
(`FIRST_LINE`). Text in backticks and in indented examples counts as code and is not looked at. Python files are parsed;
of C files the comments are read.
"""

from __future__ import annotations

import ast
import re
import sys
import tokenize
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["FIRST_LINE", "REFUSED", "Text", "findings", "main", "sources", "texts"]

FOLDERS: Final = ("zcactor", "simulation", "tests", "benchmarks", "examples", "tools", "docs")
LEFT_OUT: Final = frozenset({"_fbs", "_build", "__pycache__", ".venv", "build"})

_START: Final = r"(?:^|(?<=[.:;!?]\s))"
"""The beginning of a sentence or of a clause that could be one."""
REFUSED: Final[dict[str, str]] = {
    rf"{_START}(?:who|whom|whose)\b(?![^.?!]*\?)": "name the subject: 'A caller that ...', 'The process that ...'",
    r"\b(?:whoever|whomever|whosoever|whatever)\b": "name the thing: 'any caller', 'each value'",
    rf"{_START}what\b(?![^.?!]*\?)": "name the thing: 'The bytes that ...', not 'What ...'",
    r"(?<!\bthere )\b(?:is|are|was|were|be) (?-i:none)\b": "say that something is missing: 'there is no ...'",
    r"\b(?:is|are|was|were|be|been|being) told of\b": "say what happens: 'learns of', 'is called with'",
    r"\bthat of (?:which|whom|what)\b": "name the thing",
    r"\bof (?:whom|what)\b": "name the thing",
    r"\bto (?:whom|what)\b": "name the thing",
    r"\b(?:used to|no longer|not any more|any longer|formerly|previously|anymore)\b (?:be|do|have|was|were)\b":
        "do not tell the code's history: git has it",
    r"\b(?:TODO|FIXME|XXX)\b": "do it, or write it down where work is planned",
    r"\bissue #?\d+": "do not point to a tracker: give the reason here",
}  # fmt: skip
"""Patterns that are refused anywhere, in lower and upper case, and the remedy."""
FIRST_LINE: Final[dict[str, str]] = {
    r"^(?:who|whom|whose|what|where|when|how|why|that|it|they|he|she|here|there|then)\b":
        "begin with a noun phrase or an imperative",
    r"^(?:begins|brings|carries|collects|finds|gives|holds|inherits|keeps|lets|makes|opens|packs|registers|sends"
    r"|takes|tells|watches|writes)\b": "begin with a noun phrase or an imperative: 'The ...', 'Make ...'",
    r"^(?:by|of)\b": "name the thing before: 'The lanes by ...'",
    r"^(?:this|these) (?:function|method|class|module|file|test|tests)\b": "leave out 'This function'",
}  # fmt: skip
"""Patterns that are refused at the beginning of a docstring, and the remedy."""
_REFUSED: Final = [(re.compile(pattern, re.IGNORECASE), remedy) for pattern, remedy in REFUSED.items()]
_FIRST: Final = [(re.compile(pattern, re.IGNORECASE), remedy) for pattern, remedy in FIRST_LINE.items()]

_CODE: Final = re.compile(r"``[^`]+``|`[^`\n]+`")
_EXAMPLE: Final = re.compile(r"::\n\n(?: {2,}.*\n|\n)+")
_C_COMMENT: Final = re.compile(r"/\*(.*?)\*/|//([^\n]*)", re.DOTALL)


class Text(NamedTuple):
    """A docstring or a comment."""

    line: int
    """The number of its first line, from 1."""
    text: str
    docstring: bool


def sources(paths: Iterable[Path]) -> Iterator[Path]:
    """The Python and C files among `paths` and in folders among them, without generated ones."""
    for path in paths:
        for each in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if each.suffix in {".py", ".c", ".h"} and not LEFT_OUT & set(each.parts):
                yield each


def _docstrings(tree: ast.Module) -> Iterator[Text]:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        owner = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for at, statement in enumerate(body):
            if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
                continue
            text = statement.value.value
            # Behind an assignment a string documents it, as Sphinx reads it.
            if isinstance(text, str) and ((owner and at == 0) or isinstance(body[at - 1], ast.Assign | ast.AnnAssign)):
                yield Text(statement.lineno, text, docstring=True)


def _comments(path: Path) -> Iterator[Text]:
    """The comments of a Python file; those of lines that follow each other are one."""
    first, last, parts = 0, 0, list[str]()
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type != tokenize.COMMENT:
                continue
            text = token.string.lstrip("#!").strip()
            alone = token.line.lstrip().startswith("#")
            if parts and alone and token.start[0] == last + 1:
                parts.append(text)
            else:
                if parts:
                    yield Text(first, "\n".join(parts), docstring=False)
                first, parts = token.start[0], [text]
            last = token.start[0] if alone else 0
    if parts:
        yield Text(first, "\n".join(parts), docstring=False)


def texts(path: Path) -> Iterator[Text]:
    """The docstrings and comments of a file.

    Raises:
        SyntaxError: a Python file is not valid Python.
    """
    source = path.read_text("utf-8")
    if path.suffix == ".py":
        yield from _docstrings(ast.parse(source, filename=str(path)))
        if "#" in source:
            yield from _comments(path)
        return
    for found in _C_COMMENT.finditer(source):
        text = re.sub(r"^\s*\*+ ?", "", found[1] or found[2] or "", flags=re.MULTILINE)
        yield Text(source.count("\n", 0, found.start()) + 1, text.strip(), docstring=False)


def findings(text: Text) -> Iterator[tuple[int, str, str]]:
    """The refused phrases of a text: line, phrase and remedy."""
    prose = _EXAMPLE.sub(lambda example: "\n" * example[0].count("\n"), text.text)
    prose = _CODE.sub(lambda code: "_" * len(code[0]), prose)
    for pattern, remedy in _REFUSED:
        for found in pattern.finditer(prose):
            yield text.line + prose.count("\n", 0, found.start()), found[0].strip(), remedy
    if text.docstring:
        for pattern, remedy in _FIRST:
            if (match := pattern.match(prose.lstrip())) is not None:
                yield text.line, match[0], f"first line: {remedy}"


def main(arguments: list[str] | None = None) -> int:
    """Look for refused phrases and print them. Returns the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    root = Path(__file__).resolve().parents[1]
    chosen = list(sources([Path(each) for each in given] or [root / folder for folder in FOLDERS]))
    if not chosen:
        print(f"{' '.join(given)}: there is no Python or C file", file=sys.stderr)
        return 2
    told = []
    for path in chosen:
        name = path.relative_to(root) if path.is_relative_to(root) else path
        try:
            found = list(texts(path))
        except SyntaxError as error:
            told.append(f"{name}:{error.lineno}: it is not valid Python: {error.msg}")
            continue
        told += (f"{name}:{line}: {phrase!r}: {remedy}" for text in found for line, phrase, remedy in findings(text))
    print("\n".join(told) or f"{len(chosen)} files: no refused phrase")
    return int(bool(told))


if __name__ == "__main__":
    sys.exit(main())
