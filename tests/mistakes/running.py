"""Run programs one after the other in one process, each as Python runs a script, and keep their output."""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import zcactor
from tests.forked_agents import forked_agents
from tests.mistakes.table import MISTAKES
from zcactor.driver import driver


def run(path: Path) -> str:
    """Run one program, and return all that it and its actors print."""
    with tempfile.TemporaryFile() as output:
        kept = os.dup(1), os.dup(2)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        try:
            _execute(path)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(kept[0], 1)
            os.dup2(kept[1], 2)
            os.close(kept[0])
            os.close(kept[1])
        output.seek(0)
        return output.read().decode()


def _execute(path: Path) -> None:
    main: Any = types.ModuleType("__main__")
    main.__file__ = str(path)
    sys.modules["__main__"] = main
    try:
        exec(compile(path.read_text(), path, "exec"), vars(main))
    except SystemExit:
        pass
    except BaseException as error:
        trace = error.__traceback__
        error.with_traceback(None if trace is None else trace.tb_next)  # without this frame
        sys.excepthook(type(error), error, error.__traceback__)
        del error, trace
    vars(main).clear()
    sys.last_value = None
    gc.collect()  # warnings about objects that the program has left come as at its end
    driver._at_exit()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    sys.path.insert(0, str(folder))
    assert zcactor.__file__
    names = sys.argv[2:] or [mistake.name for mistake in MISTAKES]
    with forked_agents():
        told = {name: run(folder / f"{name}.py") for name in names}
    (folder / "told.json").write_text(json.dumps(told))
