"""`relaxd demo`: a real language model learns to add, or a tiny one to call a calculator, with any algorithm.

For distillation, the demo first finds or trains a teacher.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from relaxd.cli.execute import Where, check_run_id, execute, free_folder, new_run_id
from relaxd.cli.options import DEFAULT_STATE, KeepUpOption, RunIdOption, StateOption, new_console
from relaxd.cli.output import sayer
from relaxd.cli.preparing.first_steps import demo_overrides, example
from relaxd.client import CliError
from relaxd.config import RunConfig
from relaxd.config.load_toml import load_file
from relaxd.local.state_folder import StateFolder
from relaxd.report.run_result import read_result
from relaxd.run_folder import is_run

DISTILLATION = "opd"
"""Name of the distillation algorithm, whose demo is a separate example because it needs a teacher."""


class Task(StrEnum):
    """Task that the demo's model learns; the value is the name of its example configuration."""

    ADDITION = "addition"
    TOOL_USE = "tool-use"


@dataclass(frozen=True)
class DemoTeacher:
    """Possible teacher for distillation: a model that an earlier demo trained."""

    run_id: str
    model: Path
    accuracy: float
    """The model's accuracy on the demo's held-out prompts, from 0 to 1."""


def demo(
    task: Annotated[Task, typer.Option(help="To add, or to call a calculator.")] = Task.ADDITION,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the prompts' order and of sampling.")] = 0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Optimizer steps; default: what the algorithm needs.")
    ] = None,
    algorithm: Annotated[str, typer.Option(help="Algorithm to teach it with (docs/algorithms.md).")] = "grpo",
    keep_up: KeepUpOption = False,
    run_id: RunIdOption = "",
    state: StateOption = DEFAULT_STATE,
) -> None:
    """Teach a real language model to add two-digit numbers, on this machine, in minutes.

    With --task tool-use a tiny model, which is made here, learns to call a calculator instead.

    With --algorithm opd its teacher is the best model that an earlier demo of as many steps has trained; without one,
    it is trained first, as the run RUN_ID-teacher.
    """
    run_id = run_id or new_run_id("demo")
    where, console = Where(StateFolder(state), keep_up=keep_up), new_console()
    if algorithm != DISTILLATION:
        execute(demo_config(algorithm, seed, steps, task), run_id, where, console)
        return
    if task != Task.ADDITION:
        raise CliError(
            f"--algorithm {DISTILLATION} learns from a teacher that has learned {Task.ADDITION}, not {task}",
            f"relaxd demo --task {task} --algorithm grpo",
        )

    def train_teacher(config: RunConfig, run_id: str) -> None:
        execute(config, run_id, replace(where, keep_up=False), console)

    execute(distillation_config(run_id, seed, steps, train_teacher, sayer(console)), run_id, where, console)


def demo_config(algorithm: str, seed: int, steps: int | None, task: Task = Task.ADDITION) -> RunConfig:
    """Return the configuration of the demo with an algorithm that needs no teacher. Raises ConfigError."""
    return load_file(example(f"{task}.toml"), ["--run.seed", str(seed), *demo_overrides(algorithm), *_steps(steps)])


def distillation_config(
    run_id: str,
    seed: int,
    steps: int | None,
    train: Callable[[RunConfig, str], object],
    say: Callable[[str], None],
) -> RunConfig:
    """Return the configuration of the distillation demo, after training a teacher if no earlier demo has one.

    Args:
        run_id: id of the distillation run.
        seed: seed of the teacher's run; the student's run uses `seed` + 1, for another order of prompts.
        steps: optimizer steps of each run; None: the defaults of the examples.
        train: trains a teacher, given its configuration and the id of its run.
        say: prints a line.

    Raises CliError: the run's folder is in use, or the teacher's run ended before its steps; ConfigError.
    """
    of_teacher = demo_config("grpo", seed, steps)
    check_run_id(run_id)
    free_folder(of_teacher.run.folder, run_id)  # before minutes of training
    teacher, teaching = best_teacher(of_teacher), f"{run_id}-teacher"
    if teacher is None:
        say(f"no demo has trained a model here that can teach: training one first, as run {teaching}")
        train(of_teacher, teaching)
        teacher = best_teacher(of_teacher)
    if teacher is None:
        raise CliError(
            f"run {teaching} ended without a model of {of_teacher.run.steps} steps, which was to be the teacher",
            "relaxd demo --algorithm opd trains another one",
        )
    say(f"the teacher is the model of run {teacher.run_id}, with an accuracy of {teacher.accuracy:.2f}")
    words = ["--run.seed", str(seed + 1), "--roles.teacher.model", str(teacher.model), *_steps(steps)]
    return load_file(example("opd.toml"), words)


def _steps(steps: int | None) -> list[str]:
    return ["--run.steps", str(steps)] if steps is not None else []


def best_teacher(demo: RunConfig) -> DemoTeacher | None:
    """Return the most accurate model that an earlier demo trained on rewards for at least `demo`'s steps, or None."""
    folders = sorted(demo.run.folder.iterdir()) if demo.run.folder.is_dir() else []
    found = [teacher for folder in folders if is_run(folder) and (teacher := _teacher_in(folder, demo)) is not None]
    return max(found, key=lambda one: one.accuracy, default=None)


def _teacher_in(folder: Path, demo: RunConfig) -> DemoTeacher | None:
    with contextlib.suppress(CliError):  # another version's, or damaged
        result = read_result(folder)
        config, accuracy = result.config, result.summary.get("accuracy_after")
        if (
            config is not None
            and (config.model, config.data, config.reward) == (demo.model, demo.data, demo.reward)
            and not config.algorithm.needs_teacher
            and result.summary.get("steps", 0) >= demo.run.steps
            and accuracy is not None
            and (folder / "model" / "config.json").is_file()
        ):
            return DemoTeacher(result.run_id, folder / "model", float(accuracy))
    return None
