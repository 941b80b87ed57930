"""Computing times of pipeline stages, and how long their schedules would take if nothing else took time."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import services.trainer.megatron.cpu_support  # noqa: F401  must come before Megatron

# isort: split
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules

REPEATS = 3
"""Passes of one micro-batch, after one to warm up; the fastest counts."""
Event = torch.cuda.Event


@contextmanager
def _timed(name: str, events: list[tuple[Event, Event]]) -> Iterator[None]:
    """Put events of the GPU around each call of one of Megatron's functions, behind what it waits for."""
    function: Callable[..., Any] = getattr(schedules, name)

    def timed(*arguments: Any, **named: Any) -> Any:
        begin, end = Event(enable_timing=True), Event(enable_timing=True)
        begin.record()
        result = function(*arguments, **named)
        end.record()
        events.append((begin, end))
        return result

    with mock.patch.object(schedules, name, timed):
        yield


def stage_seconds(run: Callable[[], None]) -> list[float]:
    """Return the seconds that each stage of this rank's pipeline computes for a micro-batch, forward and backward.

    Args:
        run: trains on one micro-batch, so that no stage computes while another does. All ranks call it together.
    """
    run()
    own = float("inf")
    for _ in range(REPEATS):
        events: list[tuple[Event, Event]] = []
        torch.cuda.synchronize()
        with _timed("forward_step", events), _timed("backward_step", events):
            run()
        torch.cuda.synchronize()
        own = min(own, sum(begin.elapsed_time(end) for begin, end in events) / 1000)
    group = schedules.parallel_state.get_pipeline_model_parallel_group()
    seconds = [own] * group.size()
    dist.all_gather_object(seconds, own, group=group)
    return seconds


def ideal_seconds(stages: Sequence[float], lengths: Sequence[int], chunks: int = 1) -> float:
    """Return how long schedules take on stages that share the work equally and exchange their results at once.

    A schedule of m micro-batches, at least p, on p stages with v chunks each takes as long as m + (p - 1) / v of them
    (arXiv 2104.04473, section 2.2).

    Args:
        stages: seconds of each stage for a micro-batch.
        lengths: micro-batches of each schedule.
        chunks: chunks of a stage, v.
    """
    return sum(length + (len(stages) - 1) / chunks for length in lengths) * sum(stages) / len(stages)


def divided(count: int, most: int) -> list[int]:
    """Return the lengths of the schedules in which a step of `count` micro-batches is trained: at most `most`, or 0."""
    return [min(most, count - begin) for begin in range(0, count, most)] if most else [count]
