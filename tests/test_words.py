"""Sentences that were found to be false do not come back, in the documentation or in the messages of programs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "pyproject.toml",
    *sorted(page for page in ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("zcactor/**/*.py")),
    *sorted(ROOT.glob("simulation/**/*.py")),
]

FALSE = {
    "there is one node in this version": "clusters have as many as join",
    "their receiver makes one copy, which is counted": "tensors are mapped copy-on-write",
    "Pickle is used between processes that have passed this": "large pickles travel as objects of the store",
    "ids of objects cannot be guessed": "an id is a counter and 32 random bits; the lease protects",
    "one user on one host": "the boundary is the token",
    "one suite per seam": "some seams have none",
    "No test sleeps": "some wait a moment",
    'arrays are copied"': "TCP receives in place",
    "Between hosts, frames are encrypted over TCP and not over RDMA": "both are",
    "neither over TCP nor over RDMA": "arrays are authenticated over TCP",
    "A host that vanishes is noticed within six seconds": "eight, where it is stopped",
    "arrays that were mapped stay valid; references": "they can be passed on as well",
    "run one at a time in a thread of the actor's own": "shared actors take theirs from a pool",
    "| 30 % of memory |": "of the control group's, where that is less",
    "cupy-cuda12x": "no line of the package uses it",
}
"""The sentence, and the truth."""


def words(page: Path) -> str:
    """The text of a page on one line."""
    return re.sub(r"\s+", " ", page.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("sentence", FALSE)
def test_a_false_sentence_stays_away(sentence: str) -> None:
    assert [str(page.relative_to(ROOT)) for page in PAGES if sentence in words(page)] == []


def test_what_a_holder_of_the_token_can_do_is_said() -> None:
    assert "Whoever holds the token can do everything on the cluster" in words(ROOT / "README.md")
