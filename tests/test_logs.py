"""The log of the package: no filter, handler or stream of a program harms the code that logs."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

import zcactor as zc
from tests.actors import Probe
from zcactor.logs import logger, transport_log


class Refused(Exception):
    """The error of a part that a program has added to logging."""


def refuse(*_: object, **__: object) -> bool:
    raise Refused


class Refusing(logging.Handler):
    """A handler that raises, without a filter."""

    def handle(self, record: logging.LogRecord) -> bool:
        raise Refused


def by_filter() -> Callable[[], None]:
    logger.addFilter(refuse)
    return lambda: logger.removeFilter(refuse)


def by_handler() -> Callable[[], None]:
    handler = Refusing()
    logging.getLogger().addHandler(handler)
    return lambda: logging.getLogger().removeHandler(handler)


def by_factory() -> Callable[[], None]:
    before = logging.getLogRecordFactory()
    logging.setLogRecordFactory(refuse)  # type: ignore[arg-type]  # as a program might
    return lambda: logging.setLogRecordFactory(before)


@pytest.fixture(params=[by_filter, by_handler, by_factory])
def refusing(request: pytest.FixtureRequest) -> Iterator[None]:
    """A part of logging that raises."""
    undo = request.param()
    try:
        yield
    finally:
        undo()


@pytest.mark.usefixtures("refusing")
def test_the_error_of_a_programs_part_of_logging_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    logger.warning("one %s", "word")
    try:
        raise ValueError
    except ValueError:
        logger.exception("another")
    printed = capsys.readouterr().err
    assert printed.count("--- Logging error ---") == printed.count("tests.test_logs.Refused") == 2


@pytest.mark.usefixtures("refusing")
@pytest.mark.parametrize("stream", [None, io.StringIO, object], ids=["none", "closed", "no stream"])
def test_nobody_hears_of_it_without_standard_error(
    stream: Callable[[], object] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = None if stream is None else stream()
    if isinstance(made, io.StringIO):
        made.close()
    monkeypatch.setattr(sys, "stderr", made)
    logger.error("word")


LOGGER = """
import logging, sys

class Logger(logging.Logger):
    if sys.argv[1] == "old":
        def _log(self, level, msg, args, exc_info=None, extra=None, stack_info=False):
            super()._log(level, msg, args, exc_info, extra, stack_info)
    if sys.argv[1] == "final":
        def __init_subclass__(cls):
            raise TypeError("no class of yours")

logging.setLoggerClass(Logger)
logging.basicConfig(format="%(message)s")
from zcactor.logs import logger
logger.warning("said %d", 1)
"""


@pytest.mark.parametrize("kind", ["plain", "old", "final"])
def test_a_program_may_have_a_class_of_loggers(kind: str) -> None:
    done = subprocess.run([sys.executable, "-c", LOGGER, kind], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == "said 1\n"


def test_standard_error_that_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Logs(io.StringIO):
        def write(self, text: str) -> int:
            logger.error(text)
            return len(text)

    undo = by_handler()
    try:
        monkeypatch.setattr(sys, "stderr", Logs())
        logger.warning("word")
    finally:
        undo()


def test_records_name_the_line_that_logs(caplog: pytest.LogCaptureFixture) -> None:
    for each in (logger, transport_log):
        each.warning("word")
    logging.getLogger("zcactor").warning("word")
    assert {(record.filename, record.funcName) for record in caplog.records} == {
        ("test_logs.py", "test_records_name_the_line_that_logs")
    }


async def test_a_block_ends_where_logging_raises(capsys: pytest.CaptureFixture[str]) -> None:
    undo = by_filter()
    try:
        async with zc.init(shutdown_timeout=0.1):
            probe = await Probe.spawn()
            call = probe.ahold("for ever")  # a line tells that it has not run
        with pytest.raises(zc.ConnectionLost):
            await call
        async with zc.init():
            assert await (await Probe.spawn()).note(2) == 2
    finally:
        undo()
    assert "Refused" in capsys.readouterr().err
