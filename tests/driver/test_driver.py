"""Starting and ending the runtime, and the output of actors on its way to the driver."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import logging
import os
import re
import sys
import typing
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import zcactor as zc
from tests.driver.programs import Program
from zcactor.config import SIZES, Config, FurtherSettings
from zcactor.driver import driver, joining
from zcactor.process import context
from zcactor.process.head_outage import HeadGone

PATIENCE = 20.0
"""Seconds after which a test stops waiting: a watchdog, no statement about speed."""


class Talker:
    def say(self, *lines: str, stream: str = "stdout", end: str = "\n") -> int:
        for line in lines:
            print(line, file=getattr(sys, stream), end=end)
        return os.getpid()

    def raw(self, data: bytes) -> None:
        os.write(1, data)

    def flood(self, count: int) -> int:
        for number in range(count):
            print(f"line {number}")
        return count

    def log(self) -> None:
        logging.getLogger("mine").warning("careful")
        logging.getLogger("mine").info("chatter")
        logging.basicConfig(level=logging.INFO, format="[%(levelname)s] %(message)s")
        logging.getLogger("mine").info("configured")

    def add(self, number: int) -> int:
        return number + 1

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def path(self) -> list[str]:
        return [os.getcwd(), *sys.path]

    def namespace(self) -> str:
        return zc.current_actor().handle._remote.namespace  # type: ignore[no-any-return]

    def init(self) -> None:
        asyncio.run(_init())

    def loop(self) -> str:
        return context.current().loop.__module__

    def descriptors(self) -> list[str]:
        return [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3)]

    def random(self) -> tuple[float, float, str]:
        import random
        import uuid

        import numpy as np

        return random.random(), float(np.random.rand()), str(uuid.uuid4())


async def _init() -> None:
    await zc.init()


@zc.actor
class Named(Talker):
    """`Talker` as a class with options."""


named_talkers: Any = Named
spawn: Any = zc.spawn
"""`zc.spawn` without static types, which know decorated methods only."""


@pytest.fixture
async def node() -> AsyncIterator[zc.Runtime]:
    async with asyncio.timeout(4 * PATIENCE), zc.init() as node:
        yield node


async def shown(capsys: pytest.CaptureFixture[str], until: str) -> tuple[str, str]:
    """Wait for `until` in the standard output or error, and return both."""
    out = error = ""
    async with asyncio.timeout(PATIENCE):
        while until not in out + error:
            await asyncio.sleep(0.001)
            found = capsys.readouterr()
            out, error = out + found.out, error + found.err
    return out, error


# ---------------------------------------------------------------- output


@pytest.mark.slow
async def test_what_actors_print(node: zc.Runtime, capsys: pytest.CaptureFixture[str]) -> None:
    plain, named = await spawn(Talker), await named_talkers.options(name="anna").spawn()
    pid = await plain.say("one", "two")
    assert (await shown(capsys, "two"))[0] == f"(Talker pid={pid}) one\n(Talker pid={pid}) two\n"
    other = await named.say("oops", stream="stderr")
    out, error = await shown(capsys, "oops")
    assert (out, error) == ("", f"(Named anna pid={other}) oops\n")
    await plain.say("no end", end="")
    await plain.say(" of line")
    assert (await shown(capsys, "line"))[0] == f"(Talker pid={pid}) no end of line\n"
    await plain.raw(b"\xff\x00\n")
    await plain.say("x" * 100_000, "end of x")
    out, _ = await shown(capsys, "end of x")
    assert "\ufffd\0" in out
    assert out.count("x") == 100_001
    await plain.log()
    _, error = await shown(capsys, "configured")
    assert error == f"(Talker pid={pid}) WARNING mine: careful\n(Talker pid={pid}) [INFO] configured\n"


@pytest.mark.slow
async def test_a_flood_does_not_hold_up_calls(node: zc.Runtime, capsys: pytest.CaptureFixture[str]) -> None:
    talker, other = await spawn(Talker), await spawn(Talker)
    flood = talker.flood(100_000)
    for number in range(200):
        assert await other.add(number) == number + 1
    assert await flood == 100_000
    out, error = await shown(capsys, "line 99999\n")
    numbers = [int(line.rpartition(" ")[2]) for line in out.splitlines()]
    assert numbers == sorted(set(numbers))
    assert len(numbers) == 100_000 or "left out" in error


@pytest.mark.slow
async def test_a_driver_that_does_not_listen_does_not_block_actors(tmp_path: Path) -> None:
    source = f"""
class Flood:
    def run(self, begin, done):
        with open(begin): pass
        for _ in range(400): print("x" * 99_999)
        with open(done, "w"): pass
async def main():
    begin, done = {str(tmp_path / "begin")!r}, {str(tmp_path / "done")!r}
    async with zc.init():
        actor = await zc.spawn(Flood)
        ref = actor.run(begin, done)
        await asyncio.sleep(0)
        await zc.nodes()
        # The loop is blocked before the first line, and until the actor opens the other end of the second pipe.
        with open(begin, "w"), open(done): pass
        await ref
zc.run(main())
"""
    os.mkfifo(tmp_path / "begin")
    os.mkfifo(tmp_path / "done")
    with Program(source) as program:
        assert program.status() == 0
        assert "lines of output were left out" in program.stderr()
        program.assert_clean()


@pytest.mark.slow
async def test_silence(capsys: pytest.CaptureFixture[str]) -> None:
    async with asyncio.timeout(PATIENCE), zc.init(log_to_driver=False):
        talker = await spawn(Talker)
        await talker.say("one", "two")
        await talker.flood(10_000)
    assert capsys.readouterr() == ("", "")


# ---------------------------------------------------------------- the environment of actors


@pytest.mark.slow
async def test_environment_and_paths(
    node: zc.Runtime, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = await named_talkers.options(env={"MINE": "1", "TZ": "UTC"}).spawn()
    second = await named_talkers.options(env={"MINE": "2"}).spawn()
    assert [await each.variable("MINE") for each in (first, second)] == ["1", "2"]
    assert "MINE" not in os.environ
    cwd, *path = await first.path()
    assert cwd == os.getcwd()
    assert set(map(os.path.abspath, sys.path)) <= set(path)
    assert (await first.descriptors())[0] == "/dev/null"
    assert all(target.startswith("pipe:") for target in (await first.descriptors())[1:])
    with pytest.raises(ValueError, match=r"environment of an actor has .* bytes"):
        await named_talkers.options(env={"X": "y" * 300_000}).spawn()


@pytest.mark.slow
async def test_random_numbers_differ(node: zc.Runtime) -> None:
    drawn = [await (await spawn(Talker)).random() for _ in range(3)]
    for values in zip(*drawn, strict=True):
        assert len(set(values)) == 3


@pytest.mark.slow
async def test_the_namespace() -> None:
    async with asyncio.timeout(PATIENCE), zc.init(namespace="mine"):
        actor = await named_talkers.options(name="anna").spawn()
        assert await actor.namespace() == "mine"
        assert await zc.get_actor("anna", namespace="mine") == actor
        with pytest.raises(zc.NoSuchActor):
            await zc.get_actor("anna", namespace="default")
        other = await named_talkers.options(name="anna", namespace="yours").spawn()
        assert await other.namespace() == "yours"


# ---------------------------------------------------------------- starting


@pytest.mark.slow
async def test_twice(node: zc.Runtime) -> None:
    with pytest.raises(zc.AlreadyInitialized, match=r"zc\.shutdown"):
        await zc.init()
    with pytest.raises(zc.AlreadyInitialized):
        async with zc.init():
            pass
    assert node.node_id == (await zc.nodes())[0].node_id
    assert node.node_id[:8] in repr(node)
    with pytest.raises(zc.AlreadyInitialized, match="belongs to a node already"):
        await (await spawn(Talker)).init()
    await zc.shutdown()
    with pytest.raises(zc.NotInitialized):
        await zc.shutdown()
    with pytest.raises(zc.NotInitialized):
        await spawn(Talker)
    async with zc.init():
        assert await zc.nodes()


@pytest.mark.slow
async def test_all_searches_for_a_head_to_join_have_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[float] = []

    async def join(config: Config, *_: object, patience: float, **__: object) -> Any:
        left.append(patience)
        clock = asyncio.get_running_loop().time
        now = clock()
        while clock() == now:  # of uvloop it moves by milliseconds
            await asyncio.sleep(0)
        raise HeadGone("it was killed") if len(left) < 3 else ValueError("enough")

    monkeypatch.setattr(joining, "_join_once", join)
    monkeypatch.setattr(joining, "_AGAIN", 0.0)
    with pytest.raises(ValueError, match="enough"):
        await zc.init("10.0.0.1:1", head_timeout=20.0)
    assert left[0] == pytest.approx(20.0) and left[0] > left[1] > left[2]


async def test_two_at_the_same_time() -> None:
    async with asyncio.timeout(PATIENCE):
        outcomes = await asyncio.gather(zc.init(), zc.init(), return_exceptions=True)
        assert sorted(type(outcome).__name__ for outcome in outcomes) == ["AlreadyInitialized", "EmbeddedRuntime"]
        await zc.shutdown()


@pytest.mark.slow
async def test_bad_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))  # the user who runs this may have a token
    bad: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"num_cpus": "four"}, TypeError, "num_cpus"),
        ({"num_cpus": -1}, ValueError, "num_cpus"),
        ({"store_capacity": 1}, ValueError, "store_capacity"),
        ({"transports": ["pigeon"]}, ValueError, "pigeon"),
        ({"transports": ["tcp", "tcp"]}, ValueError, "each once"),
        ({"transports": []}, ValueError, "local, verbs, tcp"),
        ({"transports": "tcp"}, TypeError, "sequence of names"),
        ({"resources": {"CPU": 1}}, ValueError, "num_cpus"),
        ({"resources": {"tape": -1}}, TypeError, "tape"),
        ({"resources": {"tape": True}}, TypeError, "tape"),
        ({"resources": {3: 1}}, TypeError, "resources"),
        ({"resources": {"\udc80": 1}}, ValueError, "resources: a key must be a text that UTF-8 can encode"),
        ({"resources": {"tape": 10**30}}, ValueError, "resources: the value of 'tape' must be at most"),
        ({"token": 3}, TypeError, "token"),
        ({"namespace": 3}, TypeError, "namespace"),
        ({"address": "127.0.0.1:1", "token": "00" * 32}, zc.ConnectionLost, "127.0.0.1:1 cannot be reached"),
        ({"address": "127.0.0.1"}, ValueError, "must be host:port"),
        ({"address": "127.0.0.1:1,host"}, ValueError, "'host' is no address"),
        ({"address": "etcd://host"}, ValueError, "'host' is no host:port"),
        ({"address": "127.0.0.1:1", "token": "secret"}, zc.AuthenticationError, "64 hexadecimal digits"),
        ({"address": "127.0.0.1:1"}, zc.AuthenticationError, "the cluster's token is needed"),
        ({"address": "127.0.0.1:1", "num_cpus": 1}, ValueError, "give them to zcactor start"),
        ({"namespace": "n" * 1001}, ValueError, "namespace must have 1 to 1,000 characters, not 1,001"),
        ({"namespace": ""}, ValueError, "namespace must have 1 to 1,000 characters, not 0"),
    ]
    for arguments, kind, match in bad:
        with pytest.raises(kind, match=match):
            await zc.init(**arguments)
    with pytest.raises(RuntimeError, match="async with"), zc.init():
        pass
    monkeypatch.setenv("ZCACTOR_NUM_CPU", "1")
    with pytest.raises(ValueError, match="did you mean 'ZCACTOR_NUM_CPUS'"):
        await zc.init()
    monkeypatch.delenv("ZCACTOR_NUM_CPU")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zcactor.toml").write_text("num_cpus = 3\n")
    async with asyncio.timeout(PATIENCE), zc.init(transports=["local", "tcp"], config=None):
        assert (await zc.cluster_resources())["CPU"] == 3
    async with asyncio.timeout(PATIENCE), zc.init(config=zc.Config(num_cpus=7, num_gpus=2), num_gpus=1):
        assert await zc.cluster_resources() == {"CPU": 7, "GPU": 1}


async def test_an_interpreter_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for executable, kind, match in (
        ("", RuntimeError, "executable"),
        ("/no/such/python", FileNotFoundError, "python"),
        ("/bin/false", zc.ConnectionLost, "status 1"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", executable)
            with pytest.raises(kind, match=match):
                await zc.init()
    assert len(os.listdir("/proc/self/fd")) <= before
    assert context.current_or_none() is None


@pytest.mark.slow
async def test_a_node_that_does_not_start_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(zc.ConnectionLost, match="spawn_timeout"):
        await zc.init(config=zc.Config(spawn_timeout=0.001))
    assert driver._runtime is None


@pytest.mark.slow
async def test_a_start_that_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    before = len(os.listdir("/proc/self/fd"))
    for turns in (0, 2, 20):
        starting = asyncio.ensure_future(_init())
        for _ in range(turns):
            await asyncio.sleep(0.001)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        del starting
        assert list(tmp_path.iterdir()) == []
    async with asyncio.timeout(PATIENCE), zc.init():
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # descriptors that the loop itself keeps for good


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
async def test_the_loop_of_actors(monkeypatch: pytest.MonkeyPatch, loop: str) -> None:
    monkeypatch.setenv("ZCACTOR_LOOP", loop)
    async with asyncio.timeout(PATIENCE), zc.init():
        assert (await (await spawn(Talker)).loop()).partition(".")[0] == loop


@pytest.mark.slow
def test_few_descriptors() -> None:
    source = """
import resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
async def main():
    async with zc.init():
        actors = []
        try:
            while True: actors.append(await zc.spawn(Busy))
        except (zc.ZcactorError, OSError) as error: tell(error=str(error), count=len(actors))
        tell(pids=[await actor.pid() for actor in actors[:5]])
        await zc.kill(actors.pop())
        await zc.kill(actors.pop())
        tell(again=await actors[0].pid())
zc.run(main())
"""
    with Program(source) as program:
        assert program.told("error")
        assert len(program.told("pids")) == 5
        program.told("again")
        assert program.status() == 0
        program.assert_clean()


@pytest.mark.slow
def test_a_hundred_shared_and_a_dozen_own(tmp_path: Path) -> None:
    """A number of actors that a laptop has room for. The test checks facts; it prints time and memory only (-s)."""
    source = """
async def main():
    begin = time.perf_counter()
    async with zc.init():
        up = time.perf_counter()
        one = await zc.spawn(Busy)
        first = time.perf_counter()
        many = await asyncio.gather(*[zc.spawn(Busy) for _ in range(20)])
        last = time.perf_counter()
        pids = [await actor.pid() for actor in many]
        def pss(pid):
            with open(f"/proc/{pid}/smaps_rollup") as file:
                return next(int(line.split()[1]) for line in file if line.startswith("Pss:"))
        tell(distinct=len(set(pids)), init=up - begin, one=first - up, twenty=last - first, pss=max(map(pss, pids)))
zc.run(main())
"""
    with Program(source) as program:
        for line in program._lines(PATIENCE):
            if line.startswith("@"):
                print(json.loads(line[1:]))
                assert json.loads(line[1:])["distinct"] == 20
        assert program.status() == 0


FEW_DESCRIPTORS = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
async def main():
    async with zc.init(store_capacity=1 << 24):
        kept = []
        try:
            while True:
                kept.append(await zc.spawn(Busy))
        except zc.InsufficientResources as error:
            tell(text=str(error), remote=isinstance(error, zc.RemoteError), pid=await kept[0].pid())
zc.run(main())
"""
SMALL_FILES = """
import resource
limit = {limit}
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
async def main():
    try:
        async with zc.init():
            array = zc.ones(1 << 10)
            actor = await zc.spawn(Busy)
            tell(sum=float(array.sum()), pid=await actor.pid())
    except zc.OutOfMemory as error:
        tell(sum=str(error))
zc.run(main())
"""


@pytest.mark.slow
def test_descriptors_that_are_used_up_are_named_by_their_own_error() -> None:
    with Program(FEW_DESCRIPTORS) as program:
        text = program.told("text")
        assert "Too many open files; see ulimit -n" in text
        assert program.status() == 0
        program.assert_clean()


@pytest.mark.slow
def test_a_limit_of_files_bounds_the_store_or_is_named() -> None:
    with Program(SMALL_FILES.format(limit=8 << 20)) as program:
        assert program.told("sum") == 1 << 10
        assert program.status() == 0
    with Program(SMALL_FILES.format(limit=100_000)) as program:
        assert program.told("sum").startswith("ulimit -f allows a file of 100,000 bytes, and the store is to have ")
        assert program.status() == 0


@pytest.mark.parametrize(("level", "heard"), [(None, "WEC"), ("DEBUG", "DIWEC"), ("INFO", "IWEC"), ("ERROR", "EC")])
def test_actors_log_from_the_drivers_level_on(level: str | None, heard: str) -> None:
    """Also those that actors spawn, and those that start again."""
    program = f"""
import logging
LEVEL = {level!r}
class Speaker:
    def speak(self, who):
        for level in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"):
            logging.getLogger("mine").log(getattr(logging, level), who)
    async def spawn(self):
        return await zc.spawn(Speaker)
    def pid(self): return os.getpid()
async def main():
    if LEVEL:
        logging.basicConfig(level=LEVEL)
        logging.getLogger("asyncio").setLevel("WARNING")
    async with zc.init(num_cpus=1):
        speaker = await zc.spawn(Speaker)
        await speaker.speak("first")
        nested = await speaker.spawn()
        await nested.speak("nested")
        again = await zc.actor(max_restarts=1)(type("Again", (Speaker,), {{}})).spawn()
        pid = await again.pid()
        os.kill(pid, signal.SIGKILL)
        while True:
            try:
                if await again.pid() != pid: break
            except (zc.ActorDied, zc.ActorUnavailable): await asyncio.sleep(0.01)
        await again.speak("again")
zc.run(main())
"""
    with Program(program) as ran:
        assert ran.status() == 0
        said = re.findall(r"([A-Z])[A-Z]+ mine: (\w+)", ran.stderr())
    for who in ("first", "nested", "again"):
        assert "".join(letter for letter, speaker in said if speaker == who) == heard


def test_every_setting_is_an_argument() -> None:
    own = inspect.signature(driver.init).parameters
    further = typing.get_type_hints(FurtherSettings)
    for field, kind in typing.get_type_hints(zc.Config).items():
        assert (field in own) != (field in further), field
        if field in further:
            assert further[field] == (kind | str if field in SIZES else kind) | None, field
    assert set(further) < {field.name for field in dataclasses.fields(zc.Config)}


async def test_a_setting_by_its_name() -> None:
    async with zc.init(warn_after=0, idle_timeout=7.5, head_timeout=None, store_capacity=1 << 26) as runtime:
        config = runtime.process.config
        assert (config.warn_after, config.idle_timeout, config.head_timeout) == (0, 7.5, zc.Config().head_timeout)
    async with zc.init(eager_limit=100, config=zc.Config(eager_limit=200, recv_depth=8)) as runtime:
        config = runtime.process.config
        assert (config.eager_limit, config.recv_depth) == (100, 8)


async def test_a_size_as_a_text() -> None:
    async with zc.init(store_capacity="64MiB", eager_limit="8 KiB", config=zc.Config(recv_depth=8)) as runtime:
        config = runtime.process.config
        assert (config.store_capacity, config.eager_limit, config.recv_depth) == (64 << 20, 8192, 8)
    with pytest.raises(ValueError, match="argument: store_capacity = 'much' must be a number of bytes, or a size such"):
        await zc.init(store_capacity="much")


def test_a_name_that_is_no_setting_is_refused_at_the_call() -> None:
    wrong: Any = {"warn_afer": 1}
    with pytest.raises(TypeError, match="zc.init: there is no setting 'warn_afer'; did you mean 'warn_after'"):
        zc.init(**wrong)


def test_the_config_is_one() -> None:
    wrong: Any = {"num_cpus": 1}
    with pytest.raises(TypeError, match=r"zc.init: config must be a zc.Config, not dict"):
        zc.init(config=wrong)
