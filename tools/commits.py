"""Check the subjects of commits; ``make lint`` runs this program.

::

    python tools/commits.py [--since REV] [FOLDER]     # this repository, and commits that BASE has not, by default

A subject is an imperative with a capital first, has at most 72 characters, no semicolon and no full stop at its end.
Commits before `BASE` are older than the rule. A checkout without the history, as of an archive, has nothing to check,
and the program says so.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BASE", "LONGEST", "main", "problems", "subjects"]

BASE: Final = "bdd9f9c"
"""The last commit that need not follow the rule."""
LONGEST: Final = 72
"""Characters: with git's indent of four and the hash, a line of a terminal's 80 to 90 columns."""
_NO_VERBS: Final = frozenset(
    {
        *("a", "an", "the", "this", "that", "these", "those", "all", "another", "any", "each", "every", "no", "some"),
        *(
            "i",
            "it",
            "its",
            "they",
            "their",
            "we",
            "you",
            "our",
            "what",
            "where",
            "which",
            "who",
            "nothing",
            "one",
            "two",
        ),
        *(
            "and",
            "as",
            "at",
            "but",
            "by",
            "for",
            "from",
            "if",
            "in",
            "into",
            "of",
            "on",
            "or",
            "to",
            "under",
            "when",
            "with",
        ),
        *("also", "more", "new", "now", "only", "still", "there", "without"),
    }
)
"""Words that begin a noun phrase or a clause."""
_VERBS: Final = frozenset(
    {
        *(
            "bleed",
            "breed",
            "embed",
            "exceed",
            "feed",
            "heed",
            "need",
            "proceed",
            "seed",
            "shed",
            "shred",
            "speed",
            "wed",
        ),
        *("bring", "cling", "fling", "ping", "ring", "sing", "sling", "spring", "sting", "string", "swing", "wring"),
        *("alias", "bias", "canvas", "focus"),
    }
)
"""Imperatives that look like another form of a verb."""


def problems(subject: str) -> list[str]:
    """The rules that a subject breaks."""
    found = []
    if len(subject) > LONGEST:
        found.append(f"it has {len(subject)} characters, {LONGEST} are the most")
    if ";" in subject:
        found.append("a semicolon joins two changes: make two commits, or name what they have in common")
    if subject.endswith("."):
        found.append("leave out the full stop at its end")
    match = re.match(r"[A-Za-z]+", subject)
    if match is None or not subject[0].isupper():
        return [*found, "begin with a verb, with a capital first, as in 'Add ...'"]
    word = match[0].lower()
    if word in _NO_VERBS or (word not in _VERBS and re.search(r"(?:ed|ing|[^su]s)$", word)):
        found.append(f"begin with an imperative, as in 'Add ...', not with {match[0]!r}")
    return found


def _git(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)


def subjects(root: Path, since: str) -> list[tuple[str, str]] | None:
    """The hash and the subject of each commit of HEAD that is not in `since`, the newest first; None where the history
    is not there."""
    listed = _git(root, "log", "--format=%h %s", f"{since}..HEAD")
    if listed.returncode != 0:
        return None
    return [(commit, subject) for commit, _, subject in (line.partition(" ") for line in listed.stdout.splitlines())]


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the subjects and print what is wrong with them. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python tools/commits.py", description="Check the subjects of commits.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).resolve().parents[1], metavar="FOLDER")
    parser.add_argument("--since", default=BASE, metavar="REV", help="check commits that REV has not (%(default)s)")
    given = parser.parse_args(arguments)
    listed = subjects(given.folder, given.since)
    if listed is None:
        print(f"{given.folder} has no history back to {given.since}: no commit was checked")
        return 0
    found = [
        f"{commit} {subject!r}: {problem}" for commit, subject in listed for problem in problems(subject)
    ]  # fmt: skip
    print("\n".join(found) or f"{len(listed)} commits since {given.since}: all subjects follow the rule")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
