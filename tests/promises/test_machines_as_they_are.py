"""Machines as their owners leave them: closed descriptors, homes of other users, quotas, missing system calls.

Programs run there, or end with a sentence that says where, which limit, and the next step.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import json
import os
import platform
import resource
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Hosts
from tests.driver.programs import PRELUDE, ROOT, Program, processes, until
from zcactor.node import numeric_threads

LOOPS = ("uvloop", "asyncio")

JOB = """
@zc.actor
class Scaler:
    def scale(self, x): return 2 * x
    def say(self): print("a line of an actor")

async def main():
    async with zc.init(num_cpus=2, store_capacity=1 << 26, warn_after=0):
        scaler = await Scaler.spawn()
        assert (await scaler.scale(np.ones(50_000))).sum() == 100_000
        await scaler.say()
    open("done", "w").close()

if __name__ == "__main__":
    zc.run(main())
"""
"""A program that calls an actor with an array, and leaves the file ``done`` at its end."""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts() as found:
        yield found


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it gives a folder to another user")

_PR_CAPBSET_DROP, _CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 24, 1, 2


def obey_modes() -> None:
    """Let a child that is started next obey the modes of files, though it is root's: to be called between fork and
    exec, after which the interpreter is found where root has it."""
    for capability in (_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH):
        assert ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) == 0


_CALLS = {
    "memfd_create": 319, "pidfd_open": 434, "fallocate": 285, "madvise": 28, "flock": 73, "eventfd2": 290,
    "timerfd_create": 283,
}  # fmt: skip
"""Numbers of calls, of x86-64 alone."""
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_LOAD, _EQUAL, _RETURN, _ALLOW, _ERRNO = 0x20, 0x15, 0x06, 0x7FFF0000, 0x00050000


def refuse(call: str, error: int) -> None:
    """Have the kernel refuse a call to this process and its children, as a container's seccomp profile does: to be
    called between fork and exec."""
    steps = [(_LOAD, 0, 0, 0), (_EQUAL, 0, 1, _CALLS[call]), (_RETURN, 0, 0, _ERRNO | error), (_RETURN, 0, 0, _ALLOW)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    header = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(program))
    libc = ctypes.CDLL(None)
    assert libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0) == 0


def run(
    *command: str | Path,
    cwd: str | Path,
    environ: dict[str, str | None] | None = None,
    before: Callable[[], None] = obey_modes,
) -> subprocess.CompletedProcess[str]:
    """Run a command of the interpreter's; None as a variable's value removes it. `before` is called in the child."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **(environ or {})}
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, env={key: value for key, value in variables.items() if value is not None},
        preexec_fn=before, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A folder of another user, with settings that would be an error here, in which this one may not look."""
    folder = tmp_path / "theirs"
    for below in (folder, folder / ".config" / "zcactor"):
        below.mkdir(parents=True)
        (below / "zcactor.toml").write_text("this is no TOML")
    os.chown(folder, 12345, 12345)
    folder.chmod(0o700)
    return folder


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """The path of a program with `JOB`, which also prints ``done``."""
    path = tmp_path / "job.py"
    path.write_text(PRELUDE + JOB.replace('open("done", "w").close()', 'print("done")'))
    return path


def closed(which: str) -> str:
    """The redirections of a shell that close descriptors, each given as a digit."""
    return " ".join(f"{fd}<&-" if fd == "0" else f"{fd}>&-" for fd in which)


# ---------------------------------------------------------------- descriptors that are closed


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("which", ["0", "1", "2", "012"])
def test_a_program_runs_with_standard_descriptors_closed(which: str, loop: str) -> None:
    shell = ("sh", "-c", f'exec "$0" "$1" {closed(which)}', sys.executable, "{file}")
    with Program(JOB, argv=shell, env={"ZCACTOR_LOOP": loop}) as program:
        assert program.status() == 0
        assert (program.directory / "done").exists()
        assert program.stderr() == ""
        program.assert_clean()


@pytest.mark.parametrize("which", ["0", "1", "012"])
def test_a_head_that_was_started_with_standard_descriptors_closed_is_found_and_stopped(
    hosts: Hosts, which: str
) -> None:
    command = [sys.executable, "-m", "zcactor", "start", "--head", "--port", "0", "--num-cpus", "1"]
    shell = ["sh", "-c", f'exec "$@" {closed(which)}', "sh", *command]
    with hosts.on("a"):
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = subprocess.run(
        shell, env=environ, cwd=hosts.directory, capture_output=True, text=True, timeout=50, check=False
    )
    assert (started.returncode, started.stderr) == (0, "")
    assert ("head ready" in started.stdout) == ("1" not in which)
    assert "head: pid" in hosts.zcactor("status").stdout
    assert "the head at" in hosts.zcactor("stop").stdout
    hosts.assert_clean("a")


def test_a_command_prints_nothing_into_a_file_that_got_the_number_of_standard_output(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        f"assert os.open({str(tmp_path / 'file')!r}, os.O_CREAT | os.O_RDWR) == 1\n"
        "sys.argv = ['zcactor', '--version']\n"
        "from zcactor.__main__ import main\n"
        "main()\n"
    )
    shell = ["sh", "-c", f'exec "$@" {closed("1")}', "sh", sys.executable, "-c", code]
    done = subprocess.run(shell, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "file").read_bytes() == b""


def test_a_run_with_standard_descriptors_closed_has_its_programs_status(hosts: Hosts) -> None:
    code = "import sys; sys.exit(7)"
    shell = ["sh", "-c", f'exec "$@" {closed("012")}', "sh", sys.executable, "-m", "zcactor", "run", "--"]
    with hosts.on("a"):
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*shell, sys.executable, "-c", code], env=environ, timeout=50, check=False)
    assert done.returncode == 7
    hosts.assert_clean("a")


# ---------------------------------------------------------------- homes and folders of other users


@needs_root
def test_a_program_runs_in_the_home_and_the_folder_of_another_user(theirs: Path, job: Path) -> None:
    environ = {"HOME": str(theirs), "XDG_CONFIG_HOME": None, "XDG_STATE_HOME": None, "XDG_RUNTIME_DIR": None}
    done = run(job, cwd=theirs, environ=environ)
    assert (done.returncode, done.stderr) == (0, "")
    assert "done" in done.stdout.splitlines()


@needs_root
def test_the_commands_name_the_variable_where_a_folder_of_the_user_cannot_be_used(theirs: Path, tmp_path: Path) -> None:
    environ = {"HOME": str(theirs), "XDG_CONFIG_HOME": None, "XDG_STATE_HOME": None, "XDG_RUNTIME_DIR": str(tmp_path)}
    token = theirs / ".config" / "zcactor" / "token"
    refused = f"zcactor: {token} cannot be written: Permission denied; set XDG_CONFIG_HOME to a folder of yours"
    for command in (["token"], ["start", "--head", "--port", "0"]):
        done = run("-m", "zcactor", *command, cwd=theirs, environ=environ)
        assert (done.returncode, done.stdout, done.stderr.strip()) == (1, "", refused)
    environ["XDG_CONFIG_HOME"] = str(tmp_path / "config")
    done = run("-m", "zcactor", "start", "--head", "--port", "0", cwd=theirs, environ=environ)
    assert done.returncode == 1
    assert f"{theirs}/.local/state/zcactor/logs/node-" in done.stderr
    assert "cannot be written: Permission denied; set XDG_STATE_HOME to a folder of yours" in done.stderr
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("zcactor-")] == []
    done = run("-m", "zcactor", "doctor", "--json", cwd=theirs, environ=environ)
    assert done.returncode == 0, done.stderr


@needs_root
def test_a_file_that_is_there_and_cannot_be_read_is_an_error(job: Path, tmp_path: Path) -> None:
    (tmp_path / "zcactor.toml").write_text("num_cpus = 1")
    (tmp_path / "zcactor.toml").chmod(0)
    done = run(job, cwd=tmp_path)
    path = tmp_path / "zcactor.toml"
    assert done.stderr.splitlines()[-1] == (
        f"PermissionError: {path} cannot be read by user 0: chmod it, or take it away"
    )


# ---------------------------------------------------------------- quotas of control groups

QUOTAS = (Path("/sys/fs/cgroup/cpu", "cpu.cfs_quota_us"), Path("/sys/fs/cgroup/cgroup.controllers"))
"""Files by which control groups of version 1 and 2 are known."""


@pytest.fixture
def half_a_cpu() -> Iterator[Path]:
    """The file that takes a process into a control group with half a processor."""
    old, new = QUOTAS
    if not os.access(old.parent, os.W_OK) and not os.access(new.parent, os.W_OK):
        pytest.skip("no control groups can be made here: that needs root, and cgroups that may be written to")
    folder = (old if old.exists() else new).parent / f"zct-{os.getpid()}"
    folder.mkdir()
    try:
        if old.exists():
            (folder / "cpu.cfs_quota_us").write_text("50000")
        elif (folder / "cpu.max").exists():
            (folder / "cpu.max").write_text("50000 100000")
        else:
            pytest.skip("the control group has no controller for processors")
        yield folder / "cgroup.procs"
    finally:
        until(lambda: not (folder / "cgroup.procs").read_text(), "processes to leave the group")
        folder.rmdir()


def test_half_a_processor_is_offered_as_one(half_a_cpu: Path) -> None:
    source = (
        "async def main():\n"
        "    async with zc.init(store_capacity=1 << 26):\n"
        "        tell(offered=(await zc.cluster_resources())['CPU'])\n"
        "zc.run(main())\n"
    )
    shell = ("sh", "-c", f'echo 0 > {half_a_cpu} && exec "$0" "$1"', sys.executable, "{file}")
    with Program(source, argv=shell) as program:
        assert program.told("offered") == 1
        assert program.status() == 0


# ---------------------------------------------------------------- signals of batch systems

TRAINING = """
@zc.actor
class Trainer:
    async def weights(self): return "weights"

async def main():
    asked, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in HANDLED:
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(asked.set))
    async with zc.init(store_capacity=1 << 26):
        trainer = await Trainer.spawn()
        await trainer.weights()
        tell(pid=os.getpid())
        await asked.wait()
        for number in HANDLED:
            signal.signal(number, signal.SIG_IGN)  # it comes once more, where a run got it as well
        tell(saved=await trainer.weights())
zc.run(main())
"""
SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


@pytest.fixture
def usual_signals() -> Iterator[None]:
    """The usual effect of signals, which exec keeps ignored where this process ignores them."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def start_run(hosts: Hosts, source: str, *before: str) -> Program:
    """Start ``zcactor run`` with a program, on one host."""
    command = [*before, sys.executable, "-m", "zcactor", "run", "--", sys.executable, "{file}"]
    return Program(source, argv=command, env={**hosts.variables("a"), "ZCACTOR_NUM_GPUS": "0"})


@pytest.mark.parametrize("number", SIGNALS)
def test_a_run_hands_a_batch_systems_signal_to_the_program(hosts: Hosts, number: int) -> None:
    with start_run(hosts, TRAINING.replace("HANDLED", f"[{number}]")) as program:
        assert program.told("pid") != program.pid
        program.process.send_signal(number)
        assert program.told("saved") == "weights"
        assert program.status() == 0
        hosts.assert_clean("a")


@pytest.mark.parametrize("number", SIGNALS)
def test_a_program_without_a_handler_ends_the_run_in_order(hosts: Hosts, number: int) -> None:
    with start_run(hosts, TRAINING.replace("HANDLED", "[]")) as program:
        program.told("pid")
        program.process.send_signal(number)
        assert program.status() == 128 + number
        hosts.assert_clean("a")


def test_a_run_under_nohup_outlives_sighup(hosts: Hosts) -> None:
    with start_run(hosts, TRAINING.replace("HANDLED", "[signal.SIGUSR1]"), "nohup") as program:
        pid = program.told("pid")
        for number in (signal.SIGHUP, signal.SIGUSR1):
            program.process.send_signal(number)
            if number == signal.SIGHUP:
                os.kill(pid, number)
        assert program.told("saved") == "weights"
        assert program.status() == 0


@pytest.mark.usefixtures("usual_signals")
@pytest.mark.parametrize("in_a_run", [False, True])
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_to_every_process_of_a_job_reaches_the_program_alone(
    hosts: Hosts, number: int, in_a_run: bool
) -> None:
    source = TRAINING.replace("HANDLED", f"[{number}]")
    with start_run(hosts, source) if in_a_run else Program(source) as program:
        program.told("pid")
        everyone = processes(hosts.mark if in_a_run else program.mark)
        assert len(everyone) >= 4  # the program, its agent, the zygote, and a worker
        for pid in everyone:
            with contextlib.suppress(ProcessLookupError):  # the job ends as soon as the program has the signal
                os.kill(pid, number)
        assert program.told("saved") == "weights"
        assert program.status() == 0


@pytest.mark.usefixtures("usual_signals")
def test_a_program_that_an_actor_starts_has_the_usual_signals() -> None:
    source = """
@zc.actor
class Starter:
    def start(self):
        child = subprocess.Popen(["sleep", "1000"])
        child.send_signal(signal.SIGUSR1)
        return child.wait()
async def main():
    async with zc.init(store_capacity=1 << 26):
        tell(status=await (await Starter.spawn()).start())
zc.run(main())
"""
    with Program(source) as program:
        assert program.told("status") == -signal.SIGUSR1
        assert program.status() == 0


# ---------------------------------------------------------------- threads of numeric libraries

THREADS = """
import threadpoolctl
@zc.actor
class Blas:
    def threads(self):
        (found,) = [each["num_threads"] for each in threadpoolctl.threadpool_info() if each["user_api"] == "blas"]
        return found, os.environ.get("OMP_NUM_THREADS")

async def main():
    async with zc.init(num_cpus=64, store_capacity=1 << 26):
        for options in OPTIONS:
            tell(threads=await (await Blas.options(**options).spawn()).threads())
zc.run(main())
"""
Options = list[dict[str, object]]
NO_THREADS: dict[str, str | None] = {"OMP_NUM_THREADS": None, "OPENBLAS_NUM_THREADS": None, "GOTO_NUM_THREADS": None}


def threads_of(options: Options, environ: dict[str, str | None]) -> list[tuple[int, str | None]]:
    """The threads of NumPy's BLAS in an actor of each of these options, and the value of ``OMP_NUM_THREADS`` there."""
    with Program(THREADS.replace("OPTIONS", repr(options)), env={**NO_THREADS, **environ}) as program:
        found = [tuple(program.told("threads")) for _ in options]
        assert program.status() == 0, program.stderr()
        assert "Error" not in program.stderr()
    return found


def test_threads_of_numpy_follow_the_environment_of_an_actor() -> None:
    given: Options = [
        {"env": {"OMP_NUM_THREADS": "3"}},
        {"env": {"OPENBLAS_NUM_THREADS": "1"}},
        {"env": {"OPENBLAS_NUM_THREADS": "3", "OMP_NUM_THREADS": "1"}},
        {"env": {"OMP_NUM_THREADS": "3,2"}, "num_cpus": 1},
    ]
    assert threads_of(given, {}) == [(3, "3"), (1, None), (3, "1"), (3, "3,2")]


def test_a_library_whose_path_is_no_text_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        "\udce9".encode()

    monkeypatch.setattr(numeric_threads, "ThreadpoolController", refuse)
    assert numeric_threads.loaded_libraries.__wrapped__() == []


def test_threads_of_numpy_follow_the_processors_of_an_actor() -> None:
    unbound: Options = [{}, {"env": {"OMP_NUM_THREADS": "many"}}, {"process": "shared", "num_cpus": 3}]
    (default, _), *rest = threads_of(unbound, {})
    assert [number for number, _ in rest] == [default, default]
    given: Options = [{"num_cpus": 0.25}, {"num_cpus": 1}, {"num_cpus": 2.5}, {"num_cpus": 3, "max_restarts": 1}]
    assert threads_of(given, {}) == [(1, "1"), (1, "1"), (3, "3"), (3, "3")]


def test_the_environment_of_a_node_says_how_many_threads_there_are() -> None:
    assert threads_of([{}, {"num_cpus": 1}], {"OPENBLAS_NUM_THREADS": "2"}) == [(2, None), (2, "1")]
    assert threads_of([{"num_cpus": 1}], {"OMP_NUM_THREADS": "2"}) == [(2, "2")]
    assert threads_of([{"num_cpus": 1}], {"OMP_NUM_THREADS": ""}) == [(1, "1")]


def test_variables_that_a_process_reads_at_its_start_are_named() -> None:
    source = """
@zc.actor
class One:
    def child(self): return subprocess.run(["sh", "-c", "echo $PYTHONHASHSEED"], capture_output=True).stdout.decode()
async def main():
    async with zc.init(store_capacity=1 << 26):
        one = await One.options(env={"PYTHONHASHSEED": "7", "TZ": "UTC", "MALLOC_ARENA_MAX": "1"}).spawn()
        tell(child=await one.child())
zc.run(main())
"""
    with Program(source) as program:
        assert program.told("child") == "7\n"
        assert program.status() == 0
        assert "env sets MALLOC_ARENA_MAX, PYTHONHASHSEED, which a process reads when it starts" in program.stderr()


# ---------------------------------------------------------------- calls that the kernel does not have


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of calls are those of x86-64")
@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EPERM])
@pytest.mark.parametrize("call", _CALLS)
def test_a_call_that_is_missing_is_named_with_the_way_out(job: Path, tmp_path: Path, call: str, error: int) -> None:
    base = tmp_path / "run"
    base.mkdir()
    before = functools.partial(refuse, call, error)
    done = run(job, cwd=tmp_path, environ={"XDG_RUNTIME_DIR": str(base)}, before=before)
    assert done.returncode == 1
    name = "eventfd" if call == "eventfd2" else call
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"zcactor.machine.CallMissing: {name}(2) fails here: {os.strerror(error)}. zcactor needs it")
    assert f"Linux 5.3 and newer have it, and this is {platform.release()}" in last
    assert last.endswith("such as the seccomp profile of a container: allow the call there")
    assert list(base.iterdir()) == []
    assert not {each for each in os.listdir("/dev/shm") if "zcactor" in each}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of calls are those of x86-64")
def test_the_commands_say_the_same_of_a_call_that_is_missing(hosts: Hosts) -> None:
    with hosts.on("a"):
        environ: dict[str, str | None] = dict(os.environ)
    before = functools.partial(refuse, "pidfd_open", errno.ENOSYS)
    done = run("-m", "zcactor", "start", "--head", "--port", "0", cwd="/", environ=environ, before=before)
    assert (done.returncode, done.stdout) == (1, "")
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith("zcactor: pidfd_open(2) fails here: ")
    hosts.assert_clean("a")
    done = run("-m", "zcactor", "doctor", "--json", cwd="/", environ=environ, before=before)
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert not report["usable"]
    assert report["machine"]["missing_calls"] == [sentence.removeprefix("zcactor: ")]


# ---------------------------------------------------------------- a sentence for each surprise


def test_a_program_runs_in_a_working_directory_that_was_removed(job: Path, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    done = run(job, cwd=gone, before=lambda: gone.rmdir())
    assert (done.returncode, done.stderr) == (0, "")
    assert "done" in done.stdout.splitlines()


@needs_root
def test_a_program_runs_under_a_umask_that_takes_its_own_rights(job: Path, tmp_path: Path) -> None:
    base = tmp_path / "run"
    base.mkdir()

    def strictly() -> None:
        obey_modes()
        os.umask(0o177)

    done = run(job, cwd=tmp_path, environ={"XDG_RUNTIME_DIR": str(base)}, before=strictly)
    assert done.stderr == ""
    assert "done" in done.stdout.splitlines()


def test_a_store_that_ulimit_bounds_names_ulimit(tmp_path: Path) -> None:
    path = tmp_path / "full.py"
    path.write_text(PRELUDE + "async def main():\n    async with zc.init(): zc.empty(1 << 22, 'u1')\nzc.run(main())\n")
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (1 << 21, 1 << 21))
    done = run(path, cwd=tmp_path, before=limit)
    last = done.stderr.splitlines()[-1]
    assert "of 2,097,152 are used" in last
    assert last.endswith("or raise ulimit -f: the store is a file, which that limit bounds")
    roomy = path.with_name("small.py")
    roomy.write_text(path.read_text().replace("zc.init()", "zc.init(store_capacity=1 << 20)"))
    last = run(roomy, cwd=tmp_path).stderr.splitlines()[-1]
    assert last.endswith("or pass a larger store_capacity to zc.init()")


def test_a_limit_of_no_byte_for_files_is_named(job: Path, tmp_path: Path) -> None:
    done = run(job, cwd=tmp_path, before=functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (0, 0)))
    last = done.stderr.splitlines()[-1]
    assert "fallocate(2) fails here: File too large" in last and last.endswith(
        "see ulimit -a, and the limits of the container"
    )


def test_ports_that_are_too_few_are_named(job: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]  # for the program, and none for the agent of its node
    variables: dict[str, str | None] = {"ZCACTOR_TRANSPORTS": "tcp", "ZCACTOR_PORTS": f"{port}-{port}"}
    last = run(job, cwd=tmp_path, environ=variables).stderr.splitlines()[-1]
    assert f"the node could not start: cannot listen at 127.0.0.1 ports {port}-{port}: each of the ports" in last
    assert "name more of them (ports, ZCACTOR_PORTS)" in last


def block_ends() -> None:
    """Block the signal that tells of the end of a child."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])


def test_a_signal_that_a_launcher_has_blocked_reaches_who_waits_for_processes(job: Path, tmp_path: Path) -> None:
    source = """
import signal
class A:
    def die(self): os.kill(os.getpid(), signal.SIGKILL)
async def main():
    async with zc.init():
        dying, other = await zc.spawn(A), await zc.spawn(A)
        try: await dying.die()
        except zc.ActorDied as error: print("died", "signal 9" in str(error))
        await zc.stop(other)
        print("done")
zc.run(main())
"""
    path = tmp_path / "blocked.py"
    path.write_text(PRELUDE + source)
    done = run(path, cwd=tmp_path, before=block_ends)
    assert done.stdout.splitlines() == ["died True", "done"], done.stderr


def test_a_file_that_an_actor_imports_names_the_guard_that_it_lacks() -> None:
    source = """
import importlib.util
@zc.actor
class Importer:
    async def on_loop(self): return self.load()
    def load(self):
        name = "train_of_the_test"
        spec = importlib.util.spec_from_file_location(name, PATH)
        module = importlib.util.module_from_spec(spec)
        try: spec.loader.exec_module(module)
        except RuntimeError as error: return str(error)
async def main():
    async with zc.init(store_capacity=1 << 26):
        importer = await Importer.spawn()
        tell(texts=[await importer.on_loop(), await importer.load()])
PATH = os.path.join(os.path.dirname(__file__), "train.py")
with open(PATH, "w") as file:
    file.write("import zcactor as zc\\nasync def main():\\n    async with zc.init(): pass\\nzc.run(main())\\n")
zc.run(main())
"""
    with Program(source) as program:
        texts = program.told("texts")
        assert program.status() == 0
    for text in texts:
        assert "train.py was imported in an actor's process, where the program must not run again" in text
        assert text.endswith('call it below  if __name__ == "__main__":')


def test_a_child_of_multiprocessing_names_the_guard_that_a_program_lacks() -> None:
    source = """
import multiprocessing
async def main():
    async with zc.init(store_capacity=1 << 26): pass
if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=print, args=("ran",))
    child.start()
    child.join()
    tell(status=child.exitcode)
zc.run(main())
"""
    with Program(source) as program:
        assert program.told("status") == 1
        assert program.status() == 0
        assert "was imported in a child of multiprocessing, where the program must not run again" in program.stderr()


# ---------------------------------------------------------------- limits of the address space


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("mib", [4096, 1536, 768])
def test_a_program_runs_within_a_batch_systems_address_space(job: Path, tmp_path: Path, mib: int, loop: str) -> None:
    text = job.read_text().replace("store_capacity=1 << 26, ", "")
    job.write_text(text.replace("Scaler.spawn()", "Scaler.spawn(); other = await Scaler.spawn(); await other.say()"))
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_AS, (mib << 20, mib << 20))
    done = run(job, cwd=tmp_path, environ={"ZCACTOR_LOOP": loop}, before=limit)
    assert (done.returncode, done.stderr) == (0, "")
    assert "done" in done.stdout.splitlines()


def test_a_store_beyond_the_address_space_names_the_limit_and_the_setting(job: Path, tmp_path: Path) -> None:
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_AS, (1 << 30, 1 << 30))
    done = run(job, cwd=tmp_path, environ={"ZCACTOR_STORE_CAPACITY": ""}, before=limit)
    assert done.returncode == 0
    job.write_text(job.read_text().replace("1 << 26", "1 << 34"))
    done = run(job, cwd=tmp_path, before=limit)
    assert done.stderr.splitlines()[-1] == (
        "zcactor.errors.OutOfMemory: ulimit -v allows an address space of 1,073,741,824 bytes, and the store is to "
        "have 17,179,869,184: raise that limit, or pass a smaller store_capacity to zc.init()"
    )
