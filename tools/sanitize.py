"""Build the native parts with gcc's address and undefined-behaviour sanitizers, and run the programs that exercise
them.

    python tools/sanitize.py [--seconds 60] [--seed N] [ARGUMENTS OF PYTEST]

Two programs run side by side: the tests of the native parts, and frames that are changed at random, for that many
seconds of CPU. Any report of a sanitizer fails, and so does an object of the native parts that is alive when one ends.
The interpreter and NumPy keep memory until the end as they like, so leaks are looked for among these objects only.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "sanitize"
FLAGS = "-g -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all -DCOUNT_LIVING"
LIBRARIES = ("libasan.so", "libubsan.so", "libstdc++.so")  # the last: the sanitizer intercepts C++ exceptions
TESTS = (
    "tests/native",
    "tests/collectives/test_folding.py",
    "tests/rpc/test_session_conformance.py",
    "tests/objectstore/test_heap.py",
    "tests/objectstore/test_heap_handler.py",
    "tests/objectstore/test_heap_machine.py",
    "tests/objectstore/test_heap_operations.py",
    "tests/objectstore/test_heap_pinning.py",
    "tests/objectstore/test_allocator.py",
)
"""The heap's C program runs under the same sanitizers in tests/objectstore/test_heap_stress.py."""


def libraries() -> list[str]:
    """The libraries to load before the interpreter."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise SystemExit("sanitize: there is no C compiler `cc`: install gcc")
    found = []
    for name in LIBRARIES:
        asked = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        path = Path(asked.stdout.strip())
        if not path.is_absolute():
            raise SystemExit(f"sanitize: {compiler} has no {name}: install the one of gcc, or set CC to a gcc")
        found.append(str(path.resolve()))
    return found


def build() -> None:
    """Build both extension modules, where their sources are newer."""
    environment = dict(os.environ, CFLAGS=FLAGS, LDFLAGS=FLAGS)
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(BUILD)]
    subprocess.run([*command, "--build-temp", str(BUILD / "objects")], cwd=ROOT, env=environment, check=True)


def environment() -> dict[str, str]:
    """The environment of the programs. The interpreter's own allocator would hide its allocations from the
    sanitizer."""
    return dict(
        os.environ,
        LD_PRELOAD=" ".join(libraries()),
        ASAN_OPTIONS="detect_leaks=0:allocator_may_return_null=1:exitcode=99",
        UBSAN_OPTIONS="halt_on_error=1:print_stacktrace=1",
        PYTHONMALLOC="malloc",
        PYTHONPATH=str(ROOT / "tools" / "sanitized"),
        ZCACTOR_SANITIZED=str(BUILD),
        ZCACTOR_SANITIZED_COUNTS="1",
    )


def main() -> int:
    """Run both programs; 0 when neither found an error."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="of CPU in which frames are changed; 60 by default")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32), help="of the changes")
    arguments, rest = parser.parse_known_args()
    build()
    surroundings = environment()
    mutants = [sys.executable, "-m", "tests.native.mutants", str(arguments.seconds), str(arguments.seed)]
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    programs = [
        subprocess.Popen(command, cwd=ROOT, env=surroundings)
        for command in (mutants, [*pytest, "--loops", "uvloop", "-m", "not slow", *TESTS, *rest])
    ]
    try:
        statuses = [program.wait() for program in programs]
    finally:
        for program in programs:
            program.kill()
    print(f"sanitize: mutated frames (seed {arguments.seed}) ended with {statuses[0]}, the tests with {statuses[1]}")
    return int(statuses[0] != 0 or statuses[1] not in (0, 5))  # 5: the arguments leave no test


if __name__ == "__main__":
    sys.exit(main())
