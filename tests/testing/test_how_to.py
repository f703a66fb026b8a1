"""The tests on the pages "Test your actors" and "Use it with FastAPI, pytest ...": they run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.testing.children import BRIEF, conftest, run

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "test-your-actors.md"
BLOCK = re.compile(r"^```python([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FAILS = " no-run the test fails, as it should"


def blocks() -> list[tuple[str, str]]:
    """The info string and the source of each Python block of the page."""
    found: list[tuple[str, str]] = BLOCK.findall(PAGE.read_text("utf-8"))
    return found


def project(pytester: pytest.Pytester, tests: str, **settings: float) -> None:
    """Write a project with these tests, in pytest-asyncio's auto mode."""
    pytester.makeini(
        "[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\nfilterwarnings = error\n"
    )
    pytester.makeconftest(conftest(**settings))
    pytester.makepyfile(test_counter=tests)


@pytest.mark.slow
def test_its_tests_pass(pytester: pytest.Pytester) -> None:
    first, *others = [source for info, source in blocks() if info != FAILS]
    assert first == 'pytest_plugins = ["zcactor.testing.plugin"]\n'
    tests = "\n\n".join(others)
    project(pytester, tests)
    several_seeds = 2
    count = len(re.findall(r"^(?:async )?def test_", tests, re.MULTILINE)) + several_seeds
    run(pytester).assert_outcomes(passed=count)


@pytest.mark.slow
def test_the_fixture_without_the_plugin(pytester: pytest.Pytester) -> None:
    found = BLOCK.findall(PAGE.with_name("asyncio.md").read_text("utf-8"))
    (source,) = [source for _, source in found if "def test_" in source]
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function\nfilterwarnings = error\n")
    pytester.makepyfile(test_model=source)
    run(pytester).assert_outcomes(passed=1)


@pytest.mark.slow
def test_the_failure_reads_as_it_says(pytester: pytest.Pytester) -> None:
    (fails,) = [source for info, source in blocks() if info == FAILS]
    sources = [source for info, source in blocks() if info != FAILS and "import" in source]
    project(pytester, "import asyncio\n\n" + sources[0] + fails, settling=BRIEF)
    result = run(pytester)
    result.assert_outcomes(passed=1, errors=1)
    shown = PAGE.read_text("utf-8").partition("```text\n")[2].partition("```")[0]
    lines = [line for line in shown.splitlines() if line.startswith(("zc_runtime", "  - "))]
    assert len(lines) == 3
    result.stdout.fnmatch_lines(lines)
