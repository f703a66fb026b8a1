"""The heap's C code under random operations from several threads, with sanitizers, across forks, and on a real trace.

The top of the C program lists its checks. This module compiles and runs it; where a tool is missing a test is skipped
with the reason. Timeouts are watchdogs only.
"""

from __future__ import annotations

import gzip
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.objectstore.record_trace import MIN_NBYTES, TRACE, record
from zcactor.objectstore.arena import Arena

Build = Callable[..., list[str]]

SOURCE = Path(__file__).with_name("stress.c")
FAST = ("-O2",)
THREAD = ("-O1", "-fsanitize=thread")
ADDRESS = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
ALIGNED_FROM = 1 << 20  # NumPy's memory is aligned to pages from here on: LARGE in numpy_handler.c


def run(command: Sequence[str], timeout: float = 50) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def stress(command: Sequence[str], mode: str, *arguments: object, timeout: float = 50) -> str:
    """Run the program, which must find nothing wrong; return its output."""
    ended = run([*command, mode, *map(str, arguments)], timeout)
    assert ended.returncode == 0, f"{mode} ended with {ended.returncode}:\n{ended.stderr[-6000:]}{ended.stdout}"
    return ended.stdout


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Compile the program, once for the given flags; return the command that runs it."""
    folder = tmp_path_factory.mktemp("stress")
    commands: dict[tuple[str, ...], list[str]] = {}
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler `cc`")

    def compiled(source: Path, flags: tuple[str, ...], name: str) -> tuple[list[str], str]:
        to = str(folder / f"{name}-{len(commands)}")
        ended = run([compiler, "-g", "-std=gnu11", "-pthread", *flags, str(source), "-o", to])
        return [to], ended.stderr if ended.returncode else ""

    def trial(flags: tuple[str, ...]) -> list[str]:
        """The words before a program made with the sanitizer, after a trial with a program that does nothing."""
        source = folder / "nothing.c"
        source.write_text("int main(void) { return 0; }\n")
        command, wrong = compiled(source, flags, "nothing")
        if wrong:
            pytest.skip(f"the compiler has no {flags[-1]}: {wrong.strip()[-300:]}")
        ended = run(command)
        setarch = shutil.which("setarch")
        if (
            "unexpected memory mapping" in ended.stderr and setarch
        ):  # the machine has more random addresses than the sanitizer allows for
            ended = run([setarch, "-R", *command])
            if ended.returncode == 0:
                return [setarch, "-R"]
        if ended.returncode:
            pytest.skip(f"{flags} does not run here: {ended.stderr.strip()[-300:]}")
        return []

    def made(*flags: str) -> list[str]:
        if flags not in commands:
            before = trial(flags) if flags != FAST else []
            command, wrong = compiled(SOURCE, flags, "stress")
            assert not wrong
            commands[flags] = [*before, *command]
        return commands[flags]

    return made


def counted(output: str) -> dict[str, int]:
    return {name: int(number) for name, number in (part.rsplit(" ", 1) for part in output.strip().split(", "))}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "operations"),
    [
        ("offsets", 10_000_000),
        # Modes that write to memory take ten times as long, and modes whose system calls fail or wait a hundred times.
        ("memory", 1_000_000),
        ("flaky", 500_000),
        ("pinned", 100_000),
        ("flakypinned", 50_000),
    ],
)
@pytest.mark.timeout(900)
def test_four_threads(build: Build, mode: str, operations: int) -> None:
    done = counted(stress(build(*FAST), mode, operations, timeout=850 if operations > 1_000_000 else 100))
    # Each block was freed as often as it had holders, and the heap was full now and then.
    assert done["placed"] + done["adopted"] > done["freed"] >= done["placed"] - done["refused"]
    assert done["full"] > 0 and done["verified"] > operations // 4 // 512 // 2


@pytest.mark.slow
@pytest.mark.parametrize("flags", [THREAD, ADDRESS], ids=["thread", "address"])
@pytest.mark.parametrize("mode", ["offsets", "memory", "pinned", "flakypinned"])
@pytest.mark.timeout(200)
def test_four_threads_under_a_sanitizer(build: Build, flags: tuple[str, ...], mode: str) -> None:
    done = counted(stress(build(*flags), mode, 40_000, 7, timeout=150))
    assert done["placed"] > 10_000


@pytest.mark.slow
def test_forks_while_threads_allocate(build: Build) -> None:
    # There is no sanitizer, because a thread that the child lacks may hold the lock of the address sanitizer's malloc.
    done = counted(stress(build(*FAST), "fork", 100))
    assert done["placed"] > 30


@pytest.mark.slow
def test_what_a_child_wrote_is_there_in_its_own_child(build: Build) -> None:
    stress(build(*FAST), "refork")


@pytest.mark.slow
def test_free_memory_is_found_while_it_is_trimmed(build: Build) -> None:
    stress(build(*FAST), "trim", 300)


def test_zeroed_memory_is_zero_though_the_system_refused_to_take_it_back(build: Build) -> None:
    ended = run([*build(*FAST), "punch"])
    if ended.returncode == 77:
        pytest.skip(ended.stdout.strip())
    assert ended.returncode == 0, ended.stderr


def test_zeroed_memory_is_zero_though_the_system_ignores_advice_to_take_it_back(build: Build) -> None:
    stress(build(*FAST), "ignored")


def test_ids_are_random_without_getrandom_and_never_guessable(build: Build) -> None:
    stress(build(*FAST), "random")
    ended = run([*build(*FAST), "norandom"], timeout=20)
    assert ended.returncode == -signal.SIGABRT
    assert "/dev/urandom" in ended.stderr


def balanced(lines: list[str]) -> dict[str, int]:
    """The bytes of each allocation of a trace; fails where one ends before its beginning, or twice."""
    sizes: dict[str, int] = {}
    live = set()
    for line in lines:
        kind, number, *nbytes = line.split()
        if kind == "+":
            assert number not in sizes
            sizes[number] = int(nbytes[0])
            live.add(number)
        else:
            assert kind == "-"
            live.remove(number)
    return sizes


@pytest.mark.slow
def test_the_recorder_sees_what_is_large() -> None:
    lines, _ = record(steps=2)
    sizes = balanced(lines)
    assert min(sizes.values()) >= MIN_NBYTES
    assert 6000 * 16 * 16 * 3 * 4 in sizes.values()  # the data set of the training
    assert len([line for line in lines if line[0] == "-"]) > len(sizes) * 0.9


def test_a_training_loop_fragments_the_memory_by_less_than_a_fifth() -> None:
    """The loss is of memory, not of addresses.

    A hole inside the heap goes back to the system, except for the part that a granule shares with a block. So the loss
    at the peak is the memory that stays committed beyond the blocks after a trim. The test prints the addresses up to
    the highest block beside it.
    """
    lines = gzip.decompress(TRACE.read_bytes()).decode().splitlines()
    sizes = balanced(lines)
    assert len(lines) > 10_000 and len(set(sizes.values())) > 30
    live = [0]
    for line in lines:
        kind, number, *_ = line.split()
        live.append(live[-1] + (sizes[number] if kind == "+" else -sizes[number]))
    peak = max(live)
    arena = Arena(512 << 20)
    heap = arena.heap
    blocks: dict[str, int] = {}
    for line in lines[: live.index(peak)]:
        kind, number, *_ = line.split()
        nbytes = sizes[number]
        if kind == "-":
            heap.free(blocks.pop(number))
        else:
            blocks[number] = heap.allocate(nbytes, 4096 if nbytes >= ALIGNED_FROM else 64)
            arena.commit(blocks[number], nbytes)
    end = max(offset + sizes[number] for number, offset in blocks.items())
    heap.trim(0, 1 << 62)
    print(
        f"peak {peak / 2**20:.1f} MiB; committed {heap.committed / 2**20:.1f} MiB ({heap.committed / peak - 1:.1%} "
        f"more); highest address {end / 2**20:.1f} MiB ({end / peak - 1:.1%} more)"
    )
    assert 32 << 20 < peak <= heap.used
    assert heap.committed / peak - 1 < 0.2
    for offset in blocks.values():
        heap.free(offset)
    arena.close()
