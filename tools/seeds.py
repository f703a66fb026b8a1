"""Play the seeds of the test suite: a hundred that are always the same, and fifty that each commit draws.

    python tools/seeds.py [--jobs 2]

Every fiftieth of them is played twice, and its two digests are compared; one further seed has a thousand nodes. The
seeds are drawn from the commit's hash, or from the package's sources where there is no repository, so that a commit has
the same seeds everywhere and the next commit has others. At the end the rare states are named that no run has met.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FIXED = range(1, 101)
DRAWN = 50
AGAIN = 50
"""One in so many seeds is played twice."""
MANY = ("--seed", "42", "--nodes", "1000", "--duration", "10")


def commit() -> str:
    """The hash of the present commit, which a shallow clone has as well; without a repository, one of the sources."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--verify", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        digest = hashlib.blake2b(digest_size=20)
        for path in sorted(path for room in ("zcactor", "simulation") for path in (ROOT / room).rglob("*.py")):
            digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
        return digest.hexdigest()


def drawn(of: str) -> range:
    """The seeds of a commit: numbers beyond the fixed ones, one after another.

    Args:
        of: the commit's hash, in hexadecimal digits.
    """
    first = 1000 + int(of[:10], 16) % 1_000_000 * DRAWN
    return range(first, first + DRAWN)


def play(*words: str) -> list[dict[str, Any]]:
    """Run ``python -m simulation`` with these words; a line for each seed.

    Raises:
        RuntimeError: it has played no seed.
    """
    command = [sys.executable, "-m", "simulation", *words, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    played = [line for line in lines if "digest" in line]
    if not played or not any(line.get("summary") for line in lines):
        raise RuntimeError(f"{' '.join(command)} has ended with status {done.returncode} after {len(played)} seeds")
    return played


def report(lines: list[dict[str, Any]], again: list[dict[str, Any]]) -> list[str]:
    """The failures, each in a line.

    Args:
        lines: of all seeds.
        again: of the seeds that were played twice.
    """
    failures = [
        f"seed {line['seed']}, {broken['invariant']} at {broken['at']} s: {broken['text']}; repeat it by: "
        f"python -m simulation --seed {line['seed']} --nodes {line['nodes']}"
        for line in lines for broken in line["broken"][:3]
    ]  # fmt: skip
    digests = {line["seed"]: line["digest"] for line in lines if line["nodes"] == 6}
    failures += [
        f"seed {line['seed']} was played twice, with digests {digests[line['seed']]} and {line['digest']}"
        for line in again if digests[line["seed"]] != line["digest"]
    ]  # fmt: skip
    return failures


def unmet(lines: list[dict[str, Any]], states: tuple[str, ...]) -> list[str]:
    """The states that no run has met."""
    met = {state for line in lines for state in line["sometimes"]}
    return [state for state in states if state not in met]


def main() -> int:
    """Play all of them. Returns 0 where every invariant held, and every digest came again."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", default="2", help="processes that play seeds side by side")
    jobs = ("--jobs", parser.parse_args().jobs)
    seeds = FIXED, drawn(commit())
    with ThreadPoolExecutor(1) as pool:  # one process beside the jobs: alone, each of these would use one processor
        beside = pool.submit(play, *MANY)
        repeats = [pool.submit(play, "--seed", str(seed)) for span in seeds for seed in span[AGAIN - 1 :: AGAIN]]
        lines = [line for span in seeds for line in play("--seeds", f"{span[0]}:{span[-1]}", *jobs)]
        again = [repeat.result()[0] for repeat in repeats]
        lines += beside.result()
    sys.path.insert(0, str(ROOT))
    from simulation.invariants import STATES

    failures = report(lines, again)
    spent = sum(line["cpu_s"] for line in lines)
    print(
        f"{len(lines)} seeds, the drawn ones from {seeds[1][0]} on, {len(again)} of them twice: {spent:.0f} s of CPU, "
        f"{sum(line['calls'] for line in lines)} calls, {len(failures)} failures"
    )
    print(f"rare states not met: {', '.join(unmet(lines, STATES)) or 'none'}")
    print("\n".join(failures), end="\n" if failures else "")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
