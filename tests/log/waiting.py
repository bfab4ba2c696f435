"""Reading up to the point where there is nothing to do but wait, without a thread that would do the waiting."""

from typing import Any

from headwater.broker.flow import Blocking, Completion, Flow, WaitFor

TIME_LIMIT_S = 30


def until_it_waits(flow: Flow[Any]) -> Completion[Any]:
    """Run a flow until it waits for a wake-up; that is what is returned."""
    step = next(flow)
    while not isinstance(step, WaitFor):
        if isinstance(step, Completion):
            assert step.wait(TIME_LIMIT_S)
            step = flow.send(step.result())
        else:
            assert isinstance(step, Blocking)
            step = flow.send(step.work())
    return step.completion
