"""Callbacks of a simulated process run once, or not at all."""

from __future__ import annotations

import contextvars

from simulation.step import Step, Timer


def test_a_step_is_cancelled_for_good() -> None:
    ran: list[int] = []
    step = Step(ran.append, (1,), contextvars.copy_context())
    assert not step.cancelled() and "append(" in step.failure()
    step.cancel()
    step.cancel()
    assert step.cancelled() and step.args == ()


def test_what_is_forgotten_does_nothing_and_keeps_nothing() -> None:
    ran: list[int] = []
    step = Step(ran.append, (1,), contextvars.copy_context())
    step.forget()
    assert step.callback is not None and not step.cancelled()
    step.context.run(step.callback, *step.args)
    assert not ran and step.args == ()


def test_a_timer_knows_its_time() -> None:
    timer = Timer(3.5, print, (), contextvars.copy_context())
    assert timer.when() == 3.5 and not timer.cancelled()
    timer.cancel()
    assert timer.cancelled() and timer.when() == 3.5
