"""`relaxd eval`: evaluate a model on a configuration's sets, without a run and without services."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from relaxd.cli.options import WordsArgument, data_errors, new_console
from relaxd.cli.preparing.data_command import load_words_or_prompts, set_of
from relaxd.cli.preparing.first_steps import prepare_model
from relaxd.cli.preparing.reward_command import try_reward
from relaxd.cli.reading.run_tables import results_table
from relaxd.client import CliError
from relaxd.config import RunConfig
from relaxd.config.load_toml import ConfigError, Problem
from relaxd.data.dataset import Prompt, PromptDataset, load_data, load_evaluation
from relaxd.evaluation.estimates import ScoredAnswer, summarise_set, vote_of
from relaxd.evaluation.set_checks import context_problems, set_problems
from relaxd.evaluation.sets import TRAINING, ResolvedSet, sets_of, training_set, unknown_set
from relaxd.local.programs import ROLLOUT_OFFLINE, stream_program
from relaxd.media.messages import with_parts
from relaxd.models.folders import resolve_model
from relaxd.report.run_result import set_rows
from relaxd.rewards import RewardInput

SCORED_TOGETHER = 2048
"""Maximum number of answers to score with one start of the reward program, which holds their texts in memory."""
PROGRESS_SECONDS = 5.0
ANSWER_SECONDS = 3600.0
"""Maximum time to wait for each answer of the model, in seconds; the first wait includes loading the model."""
RESULTS = "results.json"


class Device(StrEnum):
    """Device on which the evaluated model runs."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True)
class _Answered:
    """Answer of the model to a prompt, before it is scored."""

    prompt: Prompt
    sample: int
    text: str
    length: int
    finish_reason: str


def evaluate(
    words: WordsArgument,
    model: Annotated[str, typer.Option(help="Model to evaluate, as model.path; default: that of FILE.")] = "",
    names: Annotated[list[str] | None, typer.Option("--set", help="Evaluate on this set only; repeatable.")] = None,
    training: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="Instead of sets, answer the first N training prompts, with the run's sampling."
        ),
    ] = 0,
    device: Annotated[Device, typer.Option(help="Where the model is; auto: on a GPU if there is one.")] = Device.AUTO,
    out: Annotated[Path | None, typer.Option(help="Folder for answers and results; default: evaluations/TIME.")] = None,
) -> None:
    """Evaluate a model on the sets of FILE (\\[eval]), on this machine, without a run. Starts no service.

    Instead of a configuration, FILE may be a file or folder with prompts: then --reward.name names the reward.
    """
    named = ["--model.path", model] if model else []
    if training and names:
        raise CliError("--set and --training exclude each other", "evaluate them one after the other")
    config = load_words_or_prompts([*words, *named], lambda path: f"reward = {{}}\n{set_of(path)}")
    console = new_console()
    prepare_model(config, lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True))
    folder = out or Path("evaluations") / time.strftime("%Y%m%d-%H%M%S")
    line = evaluate_model(config, folder, console, names or [], device, training=training)
    console.print(results_table(set_rows([line])))
    console.print(f"answers and results are in {folder}", style="dim", markup=False, soft_wrap=True)


def evaluate_model(
    config: RunConfig,
    folder: Path,
    console: Console,
    names: Sequence[str],
    device: Device,
    *,
    step: int = 0,
    training: int = 0,
) -> dict[str, Any]:
    """Evaluate a configuration's model on the sets in `names` (empty: all), and write answers and results to a folder.

    With `training`, the model instead answers that number of training prompts, with the run's sampling.

    Returns the results, named as in metrics.jsonl, with `step`. Raises CliError, ConfigError.
    """
    sets = [training_set(config, training)] if training else _chosen(config, names)
    if config.agent.is_there:
        raise CliError(
            f'agent.environment is "{config.agent.environment}", but relaxd eval has no environments',
            "the evaluations of a run have (relaxd run)",
        )
    with data_errors():
        found = {one.name for one in sets}
        data = {TRAINING: load_data(config).train} if training else load_evaluation(config, found)
        problems = context_problems(config, resolve_model(config.model.path, weights=False))
    if problems := [*problems, *set_problems(config, data, found)]:
        raise ConfigError([Problem(setting, message) for setting, message in problems])
    if (folder / RESULTS).exists():
        raise CliError(f"{folder} has the results of an earlier evaluation", "choose another folder with --out")
    folder.mkdir(parents=True, exist_ok=True)
    line: dict[str, Any] = {"step": step}
    for one in sets:
        line |= summarise_set(one, _evaluate_set(config, one, data[one.name], device, folder, console))
    (folder / RESULTS).write_text(json.dumps({"model": config.model.path} | line, indent=2) + "\n")
    return line


def _chosen(config: RunConfig, names: Sequence[str]) -> list[ResolvedSet]:
    """Return the evaluation sets in `names` (empty: all). Raises CliError if there are no sets or a name is unknown."""
    sets = {one.name: one for one in sets_of(config)}
    if not sets:
        raise CliError("the configuration has nothing to evaluate on", "set eval.prompts, or add an [[eval.sets]]")
    for name in names:
        if name not in sets:
            raise CliError(unknown_set(name, list(sets)))
    return [one for name, one in sets.items() if not names or name in names]


def _evaluate_set(
    config: RunConfig, one: ResolvedSet, data: PromptDataset, device: Device, folder: Path, console: Console
) -> list[ScoredAnswer]:
    """Answer and score a set's prompts, write SET.jsonl, and print the progress."""
    count = min(one.prompts or len(data), len(data))
    total = count * one.samples_per_prompt
    answers: list[ScoredAnswer] = []
    said = time.monotonic()
    scored_by = config.model_copy(update={"reward": one.reward or config.reward})
    console.print(f"{one.name}: {count} prompts, {one.samples_per_prompt} answers each", highlight=False)

    with (folder / f"{one.name}.jsonl").open("w", encoding="utf-8") as file:
        waiting: list[_Answered] = []
        for answered in _answer(config, one, data, device, count):
            waiting.append(answered)
            if time.monotonic() - said > PROGRESS_SECONDS:
                said = time.monotonic()
                done = len(answers) + len(waiting)
                console.print(f"{one.name}: {done} of {total} answers", style="dim", highlight=False)
            if len(waiting) == SCORED_TOGETHER:
                answers += _score(scored_by, one, waiting, file.write)
                waiting = []
        if waiting:
            answers += _score(scored_by, one, waiting, file.write)
    return answers


def _answer(
    config: RunConfig, one: ResolvedSet, data: PromptDataset, device: Device, count: int
) -> Iterator[_Answered]:
    """Yield the model's answers to the prompts of an evaluation set, each once it is complete. Raises CliError."""
    with data_errors():
        prompts = [data.prompt(index) for index in range(count)]
    questions = [
        {
            "prompt": prompt.tokens.tolist(),
            "media": prompt.media.to_json(),
            "n": one.samples_per_prompt,
            "sampling": one.sampling_settings | {"seed": one.prompt_seed(prompt.index)},
        }
        for prompt in prompts
    ]
    asked = json.dumps({"config": config.model_dump(mode="json"), "device": device, "questions": questions})
    with closing(stream_program(ROLLOUT_OFFLINE, [], asked, seconds=ANSWER_SECONDS)) as found:
        for answer in found:
            prompt = prompts[answer["question"]]
            yield _Answered(prompt, answer["sample"], answer["text"], answer["length"], answer["finish_reason"])


def _score(config: RunConfig, one: ResolvedSet, answered: Sequence[_Answered], write: Any) -> list[ScoredAnswer]:
    """Score answers with the configuration's reward, and pass a line about each answer to `write`."""
    samples = [
        RewardInput(
            prompt=each.prompt.text,
            response=each.text,
            answer=each.prompt.answer,
            metadata=each.prompt.metadata,
            finish_reason=each.finish_reason,
            prompt_messages=with_parts(each.prompt.messages),
            tokens=each.length,
            media=each.prompt.media.by_hash() if config.reward.media else {},
        )
        for each in answered
    ]
    answers = []
    for each, outcome in zip(answered, try_reward(config, samples, workers=config.reward.workers), strict=True):
        answer = ScoredAnswer(
            index=each.prompt.index,
            sample=each.sample,
            reward=outcome.get("reward", 0.0),
            length=each.length,
            finish_reason=each.finish_reason,
            vote=vote_of(each.text) if one.samples_per_prompt > 1 else "",
            parts=outcome.get("parts", {}),
            error=outcome.get("error", ""),
        )
        texts = {"prompt": each.prompt.text, "answer": each.prompt.answer, "response": each.text}
        write(json.dumps(answer.to_json() | texts) + "\n")
        answers.append(answer)
    return answers
