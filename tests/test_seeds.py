"""The seeds of the test suite: which ones they are, and what is said of them."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from typing import Any

import pytest

SPEC = importlib.util.spec_from_file_location("seeds", Path(__file__).parents[1] / "tools" / "seeds.py")
assert SPEC is not None and SPEC.loader is not None
seeds: Any = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(seeds)


def line(seed: int, digest: str = "d", nodes: int = 6, **more: Any) -> dict[str, Any]:
    return {"seed": seed, "digest": digest, "nodes": nodes, "broken": [], "sometimes": {}, **more}


def test_a_commit_has_fifty_seeds_of_its_own() -> None:
    one, same, other = seeds.drawn("0" * 39 + "a"), seeds.drawn("0" * 40), seeds.drawn("1" + "0" * 39)
    assert one == same
    assert len(one) == len(other) == 50
    assert not set(one) & set(other)
    assert not set(one) & set(seeds.FIXED)
    assert len(seeds.FIXED) == 100


def test_the_commit_is_known_without_a_repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "zcactor").mkdir()
    (tmp_path / "zcactor" / "a.py").write_text("a = 1\n")

    def none(*_: object, **__: object) -> None:
        raise subprocess.CalledProcessError(128, "git")

    monkeypatch.setattr(seeds, "ROOT", tmp_path)
    monkeypatch.setattr(seeds.subprocess, "run", none)
    before = seeds.commit()
    assert seeds.commit() == before
    assert len(seeds.drawn(before)) == 50
    (tmp_path / "zcactor" / "a.py").write_text("a = 2\n")
    assert seeds.commit() != before


def test_failures_are_told_with_the_way_to_repeat_them() -> None:
    broken = [{"invariant": "I8", "at": 1.5, "text": "a lease"}]
    lines = [line(1), line(2, broken=broken), line(42, "other", 1000), line(42)]
    assert seeds.report(lines, [line(1), line(42)]) == [
        "seed 2, I8 at 1.5 s: a lease; repeat it by: python -m simulation --seed 2 --nodes 6"
    ]
    (told,) = seeds.report([line(1)], [line(1, "e")])
    assert told == "seed 1 was played twice, with digests d and e"


def test_states_that_were_not_met_are_named() -> None:
    lines = [line(1, sometimes={"a": 1}), line(2, sometimes={"b": 2, "z": 1})]
    assert seeds.unmet(lines, ("a", "b", "c")) == ["c"]


@pytest.mark.slow
def test_words_that_are_refused_are_no_result() -> None:
    with pytest.raises(RuntimeError, match="has ended with status 2 after 0 seeds"):
        seeds.play("--seeds", "2:1")
