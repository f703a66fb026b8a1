"""The harness of `tools/vm.py`: the properties of a guest, its output and status, and its complete removal."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from tools import vm, vm_image
from tools.vm_clock import counter_khz

ROOT = Path(__file__).resolve().parent.parent.parent
GUEST_VERBS = shlex.join([sys.executable, str(Path(__file__).resolve().parent / "guest_verbs.py")])


def _unavailable() -> str:
    """The reason why no guest can run here, or an empty string."""
    try:
        vm.check()
    except vm.Unavailable as error:
        return str(error)
    return ""


UNAVAILABLE = _unavailable()
LIMIT = 900
"""Seconds for a guest with programs in Python, a watchdog: the longest takes a quarter of that on an idle machine."""
available = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(UNAVAILABLE), reason=f"no virtual machine: {UNAVAILABLE}"),
]
BOOT_LIMIT = 400
"""Seconds for a guest without such programs, a watchdog: it takes ten, and many times that on a busy machine."""
boots_a_guest = [*available, pytest.mark.timeout(BOOT_LIMIT + 30)]
runs_programs = [*available, pytest.mark.timeout(LIMIT + 30)]

PINGPONG = """
ping_pong() { ibv_rc_pingpong -d rxe0 -g 1 -n 50 "$@"; }
client() { tries=0; until ping_pong "$1" || [ $((tries += 1)) -gt 50 ]; do sleep 0.1; done; [ $tries -le 50 ]; }
"""
"""Shell functions; `client` tries until the server listens, at most 50 times."""

SECTIONS = {
    "where": 'echo "$PWD $VM_HOST $VM_HOSTS $VM_ADDRESS $VM_PEER $(uname -r)"',
    "environment": 'printf %s "$GIVEN" | od -An -tx1',
    "gid": "cat /sys/class/infiniband/rxe0/ports/1/gids/1 /sys/class/infiniband/rxe0/ports/1/gid_attrs/types/1",
    "memlock": "ulimit -l",
    "processors": "nproc",
    "pyverbs": GUEST_VERBS,
    "ping-pong": "ping_pong & client 127.0.0.1 && wait $!",
    "counters": "rdma statistic show link rxe0/1",
    "clock": "dmesg | grep 'tsc: Detected'",
    "write": 'echo changed >>README.md; tail -1 README.md; touch "$PWD/of-the-guest"; ls of-the-guest',
    "kernel": "echo '<0>from the kernel' >/dev/kmsg",
    "signal": "sh -c 'kill -TERM $$'",
    "missing": "no-such-program",
}
"""The commands of one boot: a name, and shell commands."""


def script_of(sections: Mapping[str, str]) -> str:
    """A shell script that runs each of these commands in a shell of its own, and marks its output with its name."""
    parts = (f"echo '=== {name}'\n({text})\necho \"=== $?\"\n" for name, text in sections.items())
    return PINGPONG + "".join(parts)


def sections_of(output: str) -> dict[str, tuple[int, str]]:
    """The exit status and the output of each section of such a script."""
    found = re.findall(r"^=== (\S+)\n(.*?)=== (\d+)\n", output, re.MULTILINE | re.DOTALL)
    return {name: (int(status), text) for name, text, status in found}


@pytest.fixture(scope="session")
def sections() -> dict[str, tuple[int, str]]:
    """For each of `SECTIONS` its exit status and output; under ``all`` those of the whole run."""
    lines: list[tuple[int, str]] = []
    result = vm.run(
        ["sh", "-c", f"{script_of(SECTIONS)}\nprintf unfinished\nexit 7"],
        cwd=ROOT,
        env={"GIVEN": "a 'b' \"c\"\n$d\\"},
        processors=2,
        timeout=BOOT_LIMIT,
        on_line=lambda host, line: lines.append((host, line)),
    )
    assert [line for _, line in lines] == result.output.split("\n")
    assert {host for host, _ in lines} == {1}
    return {"all": (result.status, result.output), **sections_of(result.output)}


def processes_of(parent: psutil.Process) -> list[psutil.Process]:
    """The emulators that are descendants of a process."""
    return [child for child in parent.children(recursive=True) if child.name().startswith("qemu")]


class TestOneGuest:
    pytestmark = boots_a_guest

    def test_command_runs_where_and_with_what_it_was_told(self, sections: dict[str, tuple[int, str]]) -> None:
        status, text = sections["where"]
        assert status == 0
        folder, *facts, kernel = text.split()
        assert (folder, facts) == (str(ROOT), ["1", "1", "10.77.0.1", "10.77.0.1"])
        assert kernel != platform.release()
        dump = bytes.fromhex("".join(sections["environment"][1].split()))
        assert dump == b"a 'b' \"c\"\n$d\\"

    def test_device_has_a_gid_of_roce_v2(self, sections: dict[str, tuple[int, str]]) -> None:
        assert sections["gid"] == (0, "0000:0000:0000:0000:0000:ffff:0a4d:0001\nRoCE v2\n")

    def test_clock_counts_as_this_machine(self, sections: dict[str, tuple[int, str]]) -> None:
        """A kernel that finds another rate than ours, which it names behind its own, has a clock that is wrong."""
        rates = re.findall(r"Detected (\S+) MHz", sections["clock"][1])
        assert float(rates[-1]) * 1000 == pytest.approx(counter_khz(), rel=0.01)

    def test_memory_may_be_locked(self, sections: dict[str, tuple[int, str]]) -> None:
        assert sections["memlock"] == (0, "unlimited\n")

    def test_processors(self, sections: dict[str, tuple[int, str]]) -> None:
        assert sections["processors"] == (0, "2\n")

    def test_pyverbs_reads_through_the_device(self, sections: dict[str, tuple[int, str]]) -> None:
        if not any(vm.PYVERBS.glob(f"device.{sys.implementation.cache_tag}-*.so")):
            pytest.skip("Debian's pyverbs is for another version of Python than this one")
        assert sections["pyverbs"] == (0, "READ 1048576 bytes\n")

    def test_two_processes_play_ping_pong(self, sections: dict[str, tuple[int, str]]) -> None:
        status, text = sections["ping-pong"]
        assert status == 0, text
        assert text.count("50 iters in") == 2, text
        words = sections["counters"][1].split()
        assert int(words[words.index("rdma_sends") + 1]) >= 100

    def test_status_and_the_last_line_without_an_end_come_through(self, sections: dict[str, tuple[int, str]]) -> None:
        status, text = sections["all"]
        assert status == 7
        assert text.endswith("\nunfinished")
        assert sections["signal"][0] == 128 + signal.SIGTERM
        assert sections["missing"][0] == 127 and "no-such-program" in sections["missing"][1]

    def test_kernel_messages_are_not_in_the_output(self, sections: dict[str, tuple[int, str]]) -> None:
        assert sections["kernel"] == (0, "")

    def test_writes_stay_in_the_guest(self, sections: dict[str, tuple[int, str]]) -> None:
        assert sections["write"] == (0, "changed\nof-the-guest\n")
        assert not (ROOT / "of-the-guest").exists()
        assert not (ROOT / "README.md").read_text().endswith("changed\n")


class TestEnds:
    pytestmark = boots_a_guest

    @pytest.fixture(autouse=True)
    def scratch(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A folder that is the place of temporary files, to see whether runs leave any."""
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        return tmp_path

    def test_timeout_ends_the_guest(self, scratch: Path) -> None:
        started = time.monotonic()
        with pytest.raises(vm.GuestTimeoutError, match="no time left: host 1") as caught:
            vm.run(["sh", "-c", "echo started; sleep 1000"], timeout=8)
        assert 8 <= time.monotonic() - started < 60
        assert caught.value.outputs in (("started\n",), ("",))  # empty on a machine that took longer to boot
        assert not processes_of(psutil.Process())
        assert list(scratch.iterdir()) == []

    def test_panic_is_an_error_with_the_console(self, scratch: Path) -> None:
        # These are more bytes than the pipe and its reader hold at once: when all are written, the first line is out of
        # the guest.
        panic = "echo before; head -c 262144 /dev/zero; echo c >/proc/sysrq-trigger; sleep 1000"
        with pytest.raises(vm.GuestError, match="sysrq triggered crash") as caught:
            vm.run(["sh", "-c", panic], timeout=BOOT_LIMIT)
        assert not isinstance(caught.value, vm.GuestTimeoutError)
        assert [output.partition("\0")[0] for output in caught.value.outputs] == ["before\n"]
        assert list(scratch.iterdir()) == []

    def test_emulator_that_does_not_start_is_an_error_with_its_words(self, scratch: Path) -> None:
        with pytest.raises(vm.GuestError, match="memory"):
            vm.run(["true"], memory_mib=1 << 40, timeout=BOOT_LIMIT)
        assert list(scratch.iterdir()) == []

    def test_memlock_holds_for_root_and_an_interrupt_ends_the_guest(self, scratch: Path) -> None:
        """The clock of this guest counts instructions, too."""
        lines: list[str] = []

        def collect(host: int, line: str) -> None:
            lines.append(line)
            if line == "last":
                assert processes_of(psutil.Process())
                raise KeyboardInterrupt

        # bash tells the time without a child: another program's start waits for the host
        timed = "before=$EPOCHREALTIME; for ((i = 0; i < 20000; i++)); do :; done; after=$EPOCHREALTIME"
        loops = "; ".join([f"{timed}; echo $((${{after/./}} - ${{before/./}}))"] * 10)
        register = f"ulimit -l; {GUEST_VERBS} 2>&1 | tail -1; {loops}; echo last; sleep 1000"
        with pytest.raises(KeyboardInterrupt):
            vm.run(["bash", "-c", register], memlock_kib=64, counting=True, timeout=BOOT_LIMIT, on_line=collect)
        assert lines[0] == "64"
        once, again, *_ = sorted(map(int, lines[-11:-1]))  # work of the kernel beside a loop only adds
        assert once == pytest.approx(again, rel=0.01), "equal loops have as many instructions"
        if any(vm.PYVERBS.glob(f"device.{sys.implementation.cache_tag}-*.so")):
            assert "Cannot allocate memory" in lines[1]
        assert not processes_of(psutil.Process())
        assert list(scratch.iterdir()) == []

    def test_emulator_ends_with_the_program(self, scratch: Path) -> None:
        tool = [sys.executable, str(ROOT / "tools" / "vm.py"), "run", "--timeout", "900"]  # two boots on a slow machine
        command = [*tool, "--", "sh", "-c", "echo runs; sleep 1000"]
        with contextlib.ExitStack() as stack:
            programs = {}
            for number in (signal.SIGTERM, signal.SIGKILL):  # the two boot side by side
                folder = scratch / number.name
                folder.mkdir()
                started = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(folder)}, stdout=subprocess.PIPE)
                programs[number] = stack.enter_context(started)
                stack.callback(started.kill)
            for number, program in programs.items():
                assert program.stdout is not None
                assert program.stdout.readline() == b"runs\n"
                found = processes_of(psutil.Process(program.pid))
                assert found
                program.send_signal(number)
                assert program.wait(60) == (128 + number if number == signal.SIGTERM else -number)
                assert psutil.wait_procs(found, timeout=60)[1] == []
        assert list((scratch / "SIGTERM").iterdir()) == []


class TestArguments:
    def test_other_numbers_of_hosts(self) -> None:
        with pytest.raises(ValueError, match="hosts is 3"):
            vm.run(["true"], hosts=3)

    def test_empty_command(self) -> None:
        with pytest.raises(ValueError, match="the command is empty"):
            vm.run([])

    def test_instructions_of_two_processors(self) -> None:
        with pytest.raises(ValueError, match="instructions of 2 processors"):
            vm.run(["true"], processors=2, counting=True)

    def test_folder_that_does_not_exist(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="nowhere"):
            vm.run(["true"], cwd=tmp_path / "nowhere")

    def test_names_that_are_no_variables(self) -> None:
        with pytest.raises(ValueError, match="'A-B' is no name"):
            vm.run(["true"], env={"A-B": "1"})


class TestCheck:
    def test_other_machines(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(platform, "machine", lambda: "aarch64")
        with pytest.raises(vm.Unavailable, match="x86-64, and this is .* on aarch64"):
            vm.check()

    def test_other_distributions(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(platform, "machine", lambda: "x86_64")
        monkeypatch.setenv("PATH", "")
        with pytest.raises(vm.Unavailable, match="no apt and dpkg"):
            vm.check()

    @pytest.mark.skipif(vm.distribution() != "debian", reason="not Debian")
    def test_packages_that_may_not_be_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        monkeypatch.setattr(vm_image, "PACKAGES", ("no-such-package", "dpkg"))
        with pytest.raises(vm.Unavailable, match="not root, which it takes to install no-such-package$"):
            vm.check(prepared=False)

    @pytest.mark.skipif(vm.distribution() != "debian", reason="not Debian")
    def test_not_prepared(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(vm_image, "PACKAGES", ("dpkg",))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        vm.check(prepared=False)
        with pytest.raises(vm.Unavailable, match="run python tools/vm.py prepare"):
            vm.check()


@pytest.mark.parametrize("name", ["MODULES", "FOLDERS", "SCRIPTS"])
def test_an_image_of_other_contents_has_another_name(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    before = vm_image._recipe()
    monkeypatch.setattr(vm_image, name, ())
    assert vm_image._recipe() != before
