"""The best checkpoint of a run: which one it is, and that no order of events, nor a crash between them, loses it."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from relaxd.best_checkpoint import find_best, metric_problem, parse_metric, protected_steps
from relaxd.run_folder import checkpoint_path, checkpoint_steps
from services.trainer.loop.checkpoint_folders import rotate

METRIC = "eval.held_out.reward"
KEEP = 1
RESULTS = (0.0, 3.0, 1.0, 5.0, 5.0, 2.0)
"""Result of the evaluation of each step."""


@pytest.mark.parametrize(
    ("setting", "values", "best"),
    [
        (METRIC, {1: 0.5, 2: 0.7, 3: 0.6}, 2),
        ("-" + METRIC, {1: 0.5, 2: 0.7, 3: 0.4}, 3),
        (METRIC, {0: 0.9, 1: 0.5}, 1),  # the initial model has no checkpoint
        (METRIC, {1: 0.5, 3: 0.5}, 1),  # the earliest of equal ones
        (METRIC, {1: 0.5, 4: 0.9}, 1),  # step 4 has no checkpoint
        (METRIC, {4: 0.9}, None),
        (METRIC, {}, None),
        ("", {1: 0.5}, None),
    ],
)
def test_best_is_the_evaluated_checkpoint_with_the_best_value(
    tmp_path: Path, setting: str, values: dict[int, float], best: int | None
) -> None:
    write_record(tmp_path, values)
    found = find_best(tmp_path, setting, (1, 2, 3))
    assert (found.step if found else None) == best


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("eval.held_out.reward", ""),
        ("-eval.a.b.response_length", ""),
        ("eval.a.b.maj_at_4", ""),
        ("eval.held_out.maj_at_1", "the set 'held_out' has no metric 'maj_at_1'"),
        ("eval.a.b.pass_at_3", "has no metric 'pass_at_3', it has reward, "),
        ("eval.math.reward", "there is no evaluation set 'math', there are held_out, a.b"),
        ("reward_mean", 'it must be "eval.SET.METRIC"'),
        ("max eval.held_out.reward", 'it must be "eval.SET.METRIC"'),
    ],
)
def test_unknown_sets_and_metrics_are_refused(text: str, problem: str) -> None:
    found = metric_problem(text, {"held_out": (1, (1,)), "a.b": (4, (1, 2, 4))})
    assert problem in found
    assert bool(problem) == bool(found)


def test_metrics_have_the_names_that_evaluations_give_them() -> None:
    assert parse_metric("eval.held_out.reward").key == "eval_reward"
    assert parse_metric("eval.a.b.pass_at_2").key == "eval/a.b/pass_at_2"


def write_record(folder: Path, values: dict[int, float], evaluating: int = 0) -> None:
    evaluations = [{"step": step, "metrics": {"eval_reward": value}} for step, value in values.items()]
    (folder / "run.json").write_text(json.dumps({"evaluations": evaluations, "evaluating": evaluating}))


class World:
    """A coordinator that evaluates and a trainer that saves and removes, with the run's folder between them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.step = 0
        self.results: dict[int, float] = {}
        self.evaluating = 0
        self.saved: set[int] = set()
        """Every checkpoint that was ever complete."""
        write_record(folder, {})

    def trains(self) -> None:
        self.step += 1

    def saves(self) -> None:
        """Save a checkpoint because the schedule says so."""
        checkpoint_path(self.folder, self.step).mkdir(parents=True, exist_ok=True)
        self.saved.add(self.step)
        rotate(self.folder, KEEP, protected=protected_steps(self.folder, METRIC, self.folder))

    def begins_evaluation(self) -> None:
        """Record the version under evaluation and save its checkpoint."""
        self.evaluating = self.step
        write_record(self.folder, self.results, self.evaluating)
        self.saves()

    def ends_evaluation(self) -> None:
        if self.evaluating:
            self.results[self.evaluating] = RESULTS[self.evaluating]
            self.evaluating = 0
            write_record(self.folder, self.results)

    def coordinator_dies(self) -> None:
        """Forget the evaluation in progress; the record stays as it is."""
        self.evaluating = 0

    def check(self) -> None:
        there = set(checkpoint_steps(self.folder))
        evaluated = {step: value for step, value in self.results.items() if step in self.saved}
        best = min(evaluated, key=lambda step: (-evaluated[step], step), default=None)
        assert best is None or best in there, (best, there)
        assert self.evaluating in {0, *there}
        assert not self.saved or max(self.saved) in there


EVENTS: tuple[tuple[Any, ...], ...] = (
    (World.trains, World.saves),
    (World.trains, World.begins_evaluation),
    (World.ends_evaluation,),
    (World.coordinator_dies,),
)


def test_no_order_of_events_loses_the_best(tmp_path: Path) -> None:
    for order in itertools.product(EVENTS, repeat=5):
        folder = tmp_path / "run"
        folder.mkdir()
        world = World(folder)
        for events in order:
            for event in events:
                event(world)
                world.check()
        # Once no evaluation is in progress, exactly the best is there beside the newest.
        world.evaluating = 0
        write_record(folder, world.results)
        rotate(folder, KEEP, protected=protected_steps(folder, METRIC, folder))
        best = find_best(folder, METRIC, checkpoint_steps(folder))
        assert set(checkpoint_steps(folder)) == ({max(world.saved)} if world.saved else set()) | (
            {best.step} if best else set()
        )
        shutil.rmtree(folder)


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_trainer_removes_nothing_while_the_record_cannot_be_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match=r"run.json"):
        protected_steps(tmp_path, METRIC, tmp_path)
