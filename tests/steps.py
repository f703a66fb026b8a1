"""An action before one step of some code, where Python may run a finalizer or a signal's handler."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any


def act_at_step(
    run: Callable[[], object], step: int, act: Callable[[], object], chosen: Callable[[CodeType], bool]
) -> int:
    """Run, with an action before the step (from 0) of the chosen code. Returns the number of steps that ran.

    The action may raise. Then its exception ends the run, and reaches the caller.
    """
    at = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal at
        if not chosen(frame.f_code):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            at += 1
            if at == step + 1:
                act()
        return trace

    # Python 3.12 tells of steps only where some frame has asked for them before tracing begins.
    sys._getframe().f_trace_opcodes = True
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return at
