"""An action before one step of some code, where Python may run a finalizer or a signal's handler."""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any


@functools.cache
def _after_calls(code: CodeType) -> frozenset[int]:
    """The instructions before which the interpreter runs handlers of signals."""
    steps = list(dis.get_instructions(code))
    return frozenset(
        after.offset
        for before, after in pairwise(steps)
        if before.opname.startswith("CALL") or before.opname in ("RESUME", "JUMP_BACKWARD")
    )


def act_at_step(
    run: Callable[[], object], step: int, act: Callable[[], object], chosen: Callable[[CodeType], bool],
    *, of_handlers: bool = False,
) -> int:  # fmt: skip
    """Run, with an action before the step (from 0) of the chosen code. Returns the number of steps that ran.

    The action may raise. Then its exception ends the run, and reaches the caller. With `of_handlers` those steps count
    before which the interpreter runs handlers of signals; others are left to finalizers.
    """
    at = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal at
        if not chosen(frame.f_code):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and (not of_handlers or frame.f_lasti in _after_calls(frame.f_code)):
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
