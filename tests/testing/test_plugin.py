"""The plugin in child pytests: each fixture passes a clean test, and fails one that leaves something, in both modes."""

from __future__ import annotations

import sys

import pytest

from tests.testing.children import BRIEF, MODES, run, written

CLEAN = """
    async def test_calls(zc_runtime):
        assert zc_runtime.processes == []
        counter = await Counter.spawn(1)
        assert await counter.add(2) == 3
        array = await counter.zeros(1 << 20)
        assert array.nbytes == 1 << 20 and zc.stats().bytes_mapped == 1 << 20
        assert [info.state for info in await zc.actors()] == ["alive"]
        await zc.stop(counter)
        with pytest.raises(zc.ActorDied):
            await counter.add(1)

    async def test_each_test_has_its_own(zc_runtime):
        assert await zc.actors() == []

    async def test_that_shuts_down(zc_runtime):
        await zc.shutdown()

    async def test_init_is_refused(zc_runtime):
        with pytest.raises(zc.AlreadyInitialized):
            await zc.init()

    async def test_pair(zc_loopback):
        pair = await zc_loopback()
        counter = await pair.spawn(Counter, 4)
        assert await counter.echo("yes") == "yes"

    @pytest.fixture
    def array(zc_runtime):
        return zc.zeros(1 << 20)

    async def test_value_of_another_fixture(array):
        assert array.sum() == 0

    def test_pair_without_a_loop(zc_loopback):
        async def main():
            async with zc_loopback() as pair:
                counter = await pair.spawn(Counter, 4)
                return await counter.add(1)

        assert asyncio.run(main()) == 5

    def test_fabric(zc_rdma):
        assert [device.name for device in zc_rdma(adapters=2).devices] == ["fake0", "fake1"]

    async def program(cluster):
        counter = await cluster.spawn(Counter, 1, name="c")
        await asyncio.sleep(1)
        return await counter.add(1), cluster.now > 1

    async def test_simulation(zc_simulation):
        first, again = (zc_simulation(program, seed=1, nodes=2) for _ in range(2))
        assert first.ok and first.value == (2, True) and first.digest == again.digest

    def test_simulation_without_a_loop(zc_simulation):
        assert zc_simulation(program, seed=1, nodes=2, faults=()).value == (2, True)

    def test_pair_that_its_loop_outlives_not(zc_loopback):
        async def main():
            counter = await (await zc_loopback()).spawn(Counter, 4)
            return await counter.add(1)

        assert asyncio.run(main()) == 5
"""
EVERYWHERE = ("task", "thread", "child", "descriptor")
"""The kinds of things that tests of all fixtures can leave."""
LEAKS = {
    "task": ('KEPT.append(asyncio.create_task(asyncio.sleep(3600), name="stray"))', "task 'stray' (sleep)"),
    "task_of_an_actor": ("await (await spawn(Counter)).begin()", "task 'poll' (sleep) of Counter"),
    "thread": (
        'os.mkfifo("fifo"); threading.Thread(target=open, args=("fifo",), name="stray", daemon=True).start()',
        "thread 'stray'",
    ),
    "thread_of_an_actor": (
        'os.mkfifo("other"); KEPT.append(asyncio.ensure_future((await spawn(Counter)).wait("other"))); '
        "await asyncio.sleep(0.05); KEPT.pop().cancel()",
        "which is in Counter.wait",
    ),
    "child": ('KEPT.append(subprocess.Popen(["sleep", "60"]))', "(sleep 60)"),
    "descriptor": ('KEPT.append(open("/etc/hostname"))', "(/etc/hostname)"),
    "lease": ("KEPT.append(await (await spawn(Counter)).zeros(1 << 20))", "1 lease on 1,048,576 bytes: the test holds"),
    "lease_of_an_actor": (
        'await (await spawn(Counter)).hold(zc.zeros(1 << 20, dtype="u1"))',
        "1 lease on 1,048,576 bytes: Counter holds arrays of the test",
    ),
    "device": ('KEPT.append(fabric.binding().open("fake0"))', "device fake0, which is open"),
    "bytes": ('KEPT.append(zc.zeros(1 << 20, dtype="u1"))', "1,048,576 bytes in 1 block of the store of the test"),
}
"""A statement of a test for each kind of thing that it can leave, and the line of the report."""
OF_ONE = """
    async def test_{name}({fixture}):
        {begin}
        {leave}
"""
BEGIN = {
    "zc_runtime": "spawn = zc.spawn",
    "zc_loopback": "spawn = (await zc_loopback()).spawn",
    "zc_rdma": "fabric = zc_rdma()",
    "zc_simulation": "assert callable(zc_simulation)",
}
"""The fixtures, each with the statement that a test begins with."""


def leaks_of(fixture: str) -> dict[str, tuple[str, str]]:
    """The leaks that a test of a fixture can have."""
    if fixture in ("zc_rdma", "zc_simulation"):
        return {
            name: leak for name, leak in LEAKS.items() if name in EVERYWHERE or (name, fixture) == ("device", "zc_rdma")
        }
    return {name: leak for name, leak in LEAKS.items() if name != "device"}


AFTERWARDS = """
    def test_children_end():
        for each in KEPT:
            if isinstance(each, subprocess.Popen):
                each.kill()
                each.wait()
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_clean_tests_pass(pytester: pytest.Pytester, mode: str) -> None:
    written(pytester, mode, CLEAN)
    run(pytester).assert_outcomes(passed=11)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fixture", BEGIN)
def test_each_kind_of_leak(pytester: pytest.Pytester, fixture: str, mode: str) -> None:
    leaks = leaks_of(fixture)
    tests = [
        OF_ONE.format(name=name, fixture=fixture, begin=BEGIN[fixture], leave=leave)
        for name, (leave, _) in leaks.items()
    ]
    written(pytester, mode, "".join([*tests, AFTERWARDS]), settling=BRIEF)
    result = run(pytester)
    result.assert_outcomes(passed=len(leaks) + 1, errors=len(leaks))
    reports = result.stdout.str().split("ERROR at teardown of ")[1:]
    for (name, (_, line)), report in zip(leaks.items(), reports, strict=True):
        assert report.startswith(f"test_{name} ") and f"{fixture}: the test has left" in report and line in report


@pytest.mark.slow
def test_arrays_in_the_frames_of_a_failed_test(pytester: pytest.Pytester) -> None:
    written(
        pytester,
        "auto",
        """
            async def test_fails(zc_runtime):
                array = zc.zeros(1 << 20)
                assert array is None
        """,
    )
    run(pytester).assert_outcomes(failed=1)


@pytest.mark.slow
def test_loaded_twice_and_with_xdist(pytester: pytest.Pytester) -> None:
    written(pytester, "auto", '    pytest_plugins = ["zcactor.testing.plugin"]\n' + CLEAN)
    run(pytester, "-p", "zcactor.testing.plugin", "-n", "2").assert_outcomes(passed=11)


@pytest.mark.slow
def test_without_pytest_asyncio(pytester: pytest.Pytester) -> None:
    written(pytester, "auto", CLEAN)
    line = "ERROR: zcactor.testing needs pytest-asyncio: pip install 'zcactor[testing]'"
    result = run(pytester, "-p", "no:asyncio", "-o", "addopts=")
    assert result.ret == pytest.ExitCode.USAGE_ERROR and result.stderr.str().strip() == line


@pytest.mark.slow
def test_pytest_asyncio_is_not_installed(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    written(pytester, "auto", CLEAN)
    (pytester.mkpydir("pytest_asyncio") / "__init__.py").write_text("raise ImportError('it is not installed')")
    monkeypatch.setenv("PYTHONPATH", str(pytester.path))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    result = pytester.runpytest_subprocess(timeout=60)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert result.stderr.str().strip() == "ERROR: zcactor.testing needs pytest-asyncio: pip install 'zcactor[testing]'"


@pytest.mark.slow
def test_importing_the_package_leaves_it_out(pytester: pytest.Pytester) -> None:
    program = "import sys, zcactor; sys.exit(any(name.startswith('zcactor.testing') for name in sys.modules))"
    assert pytester.run(sys.executable, "-c", program).ret == 0
