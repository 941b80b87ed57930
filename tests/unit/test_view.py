"""What a run looks like: everything is shown, whatever the model writes."""

import io

from rich.console import Console

from relaxd.cli.view import RunView, render, samples_table, sparkline, step_line
from relaxd.v1 import coordinator_pb2 as pb


def shown(renderable: object, width: int = 140) -> str:
    console = Console(file=io.StringIO(), width=width, markup=False)
    console.print(renderable)
    return console.file.getvalue()


def message(step: int, **metrics: float) -> pb.WatchRunResponse:
    run = pb.Run(run_id="r1", state=pb.RUN_STATE_RUNNING, step=step, steps=24, reason="training")
    run.groups.published, run.groups.open, run.groups.trained, run.groups.dropped = 14, 4, 8, 2
    run.groups.dropped_by_reason["zero_variance"] = 2
    run.queues.add(stage="reward", waiting=1, held=2)
    return pb.WatchRunResponse(run=run, steps=[pb.StepMetrics(step=step, metrics=metrics)])


def test_the_live_picture_has_everything() -> None:
    view = RunView()
    assert view.update(message(1, reward_mean=0.25, staleness_mean=0.5, tokens_per_second=321.0)) == [1]
    assert view.update(message(1, reward_mean=0.25, staleness_mean=0.5, tokens_per_second=321.0)) == []
    response = "[/not markup]\n7777777777 \x1b[2J\x07"
    view.samples = [pb.TrainedSample(step=1, prompt="What is 3 + 4?", response=response, answer="7", advantage=-0.5)]
    text = shown(render(view))
    for expected in ("r1", "running", "step 1/24", "0.250", "0.50", "321", "published 14", "zero_variance 2"):
        assert expected in text
    for expected in ("reward 1+2", "What is 3 + 4?", "[/not markup] 7777777777 ·[2J·", "-0.50"):
        assert expected in text
    assert "accuracy" not in text  # this run has no such metric


def test_a_picture_before_anything_happened() -> None:
    assert "relaxd" in shown(render(RunView()))
    assert "(nothing)" in shown(samples_table([pb.TrainedSample()]))


def test_a_step_as_a_line() -> None:
    line = step_line(3, 24, {"reward_mean": 0.5, "step_seconds": 9.81, "other": 1.0})
    assert line == "step  3/24  reward 0.500  seconds 9.8"


def test_sparkline_is_cut_to_its_range() -> None:
    assert sparkline([-1.0, 0.0, 0.5, 1.0, 9.0]) == "▁▁▅██"
