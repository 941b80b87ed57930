"""`relaxd reward test`, and the trial call of a run's reward before its services start."""

import base64
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from relaxd.cli.options import DEFAULT_STATE, PASS_ON, WordsArgument, data_errors, load_words, new_console
from relaxd.cli.output import show
from relaxd.cli.preparing.first_steps import prepare_model
from relaxd.client import CliError
from relaxd.config import RunConfig
from relaxd.config.load_toml import ConfigError, Problem
from relaxd.data.dataset import Prompt
from relaxd.data.examples import Example
from relaxd.data.sources.run_sources import read_sources
from relaxd.data.tokenizer import PromptTokenizer
from relaxd.data.vision import normalise, read_vision
from relaxd.local.programs import REWARD_TRIAL, ROLLOUT_OFFLINE, run_program, stream_program
from relaxd.local.state_folder import StateFolder
from relaxd.media.messages import Message, with_parts
from relaxd.media.prompt_media import PromptMedia, with_references
from relaxd.models.folders import resolve_model
from relaxd.rewards import RewardInput
from relaxd.rewards.interface import references
from relaxd.telemetry.logs import escape

PROMPTS = 3
MADE_UP = ("I don't know.", "")
"""Made-up answers with which to try a reward: any model gives such answers now and then."""
LOAD_SECONDS = 90.0
"""Maximum time for starting the reward program and loading the reward, in seconds; time for the calls is added."""
ANSWER_SECONDS = 1800.0
"""Maximum time to wait for each answer of the model, in seconds; the first wait includes loading the model."""
MAX_LATE = 2
"""Number of timeouts of the reward after which the remaining samples are skipped."""
SHOWN = 60

reward_app = typer.Typer(help="Try a reward.", no_args_is_help=True)


@reward_app.command("test", context_settings=PASS_ON)
def reward_test(
    words: WordsArgument,
    generate: Annotated[
        int,
        typer.Option(min=0, max=64, help="Also score this many answers of the run's model to each prompt."),
    ] = 0,
) -> None:
    """Score three prompts of the data with made-up answers and the reference answer. Starts no service."""
    _, config = load_words(words)
    examples = first_prompts(config)
    with data_errors():
        generated = _generate(config, examples, generate) if generate else [[]] * len(examples)
        media = _media_of(config, examples)
    samples = [
        RewardInput(
            prompt=example.text,
            response=response,
            answer=example.answer,
            metadata=example.metadata,
            tokens=1,
            prompt_messages=messages,
            environment_reward=_paid(config),
            media=media,
        )
        for example, answers, (messages, media) in zip(examples, generated, media, strict=True)
        for response in dict.fromkeys([*filter(None, references(example.answer)[:1]), *MADE_UP, *answers])
    ]
    outcomes = try_reward(config, samples, max_late=MAX_LATE)
    console = new_console()
    _print_scores(samples, outcomes, console)
    _print_errors(outcomes, console)
    rewards = {is_right: _rewards(samples, outcomes, is_right) for is_right in (True, False)}
    if rewards[True] and rewards[False] and max(rewards[False]) >= max(rewards[True]):
        console.print("the reference answer gets no higher reward than a made-up one", style="yellow")
    if any("error" in outcome for outcome in outcomes):
        raise typer.Exit(1)


def first_prompts(config: RunConfig) -> list[Example]:
    """Return the first prompts of each data source, about PROMPTS in all. Raises ConfigError."""
    with data_errors():
        sources, _ = read_sources(config)
        each = max(1, PROMPTS // len(sources))
    found: list[Example] = []
    for source in sources:
        try:
            found += source.examples[:each]
        except ValueError as error:
            raise ConfigError([Problem(source.field, str(error))]) from error
    return found


def check_reward(config: RunConfig, prompt: Prompt) -> list[Problem]:
    """Load the run's reward and call it once, in a process like those of the reward service. Returns the problems."""
    response = references(prompt.answer)[0] or MADE_UP[0]
    sample = RewardInput(
        prompt.text,
        response,
        prompt.answer,
        prompt.metadata,
        prompt_messages=with_parts(prompt.messages),
        tokens=1,
        environment_reward=_paid(config),
        media=prompt.media.by_hash() if config.reward.media else {},
    )
    try:
        (outcome,) = try_reward(config, [sample])
    except CliError as error:
        return [Problem("", error.message)]
    if "error" not in outcome or outcome["asks_judge"]:
        return []
    told = outcome["traceback"] or outcome["error"]
    return [Problem("reward.name", f'= "{config.reward.shown}" failed for the answer {sample.response!r}: {told}')]


def _paid(config: RunConfig) -> float | None:
    """Return the environment reward that goes with a made-up answer: 0; None in a run without an environment."""
    return 0.0 if config.agent.is_there else None


def try_reward(
    config: RunConfig, samples: Sequence[RewardInput], workers: int = 1, max_late: int = 0
) -> list[dict[str, Any]]:
    """Score samples with the run's reward. Returns each sample's reward, parts and seconds, or error and traceback.

    Scores `workers` samples at the same time. After `max_late` timeouts, the remaining samples are skipped; 0: never.

    Raises CliError: the reward can't be loaded.
    """
    lines = [json.dumps(vars(sample), default=_base64_of) for sample in samples]
    return _run_trial(config, lines, len(samples), "--workers", str(workers), "--max-late", str(max_late))


def score_groups(config: RunConfig, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Score the samples of groups with the run's reward. `groups`: for each group the columns that rewards read.

    Results are those of `try_reward`.
    """
    samples = sum(max(columns["sample_of_sequence"]) + 1 for columns in groups)
    lines = list(map(json.dumps, groups))
    return _run_trial(config, lines, samples, "--workers", str(config.reward.workers), "--columns")


def _run_trial(config: RunConfig, lines: Sequence[str], samples: int, *words: str) -> list[dict[str, Any]]:
    """Run the program that scores samples. Raises CliError: the reward can't be loaded."""
    settings = config.reward
    judge = config.roles.judge
    state = StateFolder(Path(os.environ.get("RELAXD_STATE", DEFAULT_STATE)))
    named = ["--config", settings.model_dump_json(), "--judge", judge.model_dump_json()]
    named += ["--secret-file", str(state.redis_password), *words]
    # A sample whose process dies is tried twice.
    seconds = LOAD_SECONDS + 2 * samples * (settings.timeout_seconds + bool(judge.address) * judge.timeout_seconds)
    text = "".join(f"{line}\n" for line in lines)
    outcomes: list[dict[str, Any]] = run_program(REWARD_TRIAL, named, seconds=seconds, text=text)["outcomes"]
    return outcomes


def _base64_of(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _media_of(config: RunConfig, examples: Sequence[Example]) -> list[tuple[tuple[Message, ...], dict[str, bytes]]]:
    """Return each prompt's messages and images as rewards get them. Raises DataError."""
    if not config.reward.media:
        return [((), {})] * len(examples)
    vision = read_vision(resolve_model(config.model.path), config.data, config.media_kinds)
    found = []
    for example in examples:
        media = normalise(example, vision)
        messages = with_parts(with_references(example.messages, media))
        found.append((messages, PromptMedia.of(media).by_hash()))
    return found


def _generate(config: RunConfig, examples: Sequence[Example], count: int) -> list[list[str]]:
    """Return answers of the run's model to the prompts. Raises CliError, DataError."""
    prepare_model(config, show)
    tokenizer = PromptTokenizer.of_run(config, resolve_model(config.model.path))
    vision = tokenizer.vision
    questions = [
        {
            "prompt": tokens.tolist(),
            "media": PromptMedia.of(normalise(one, vision)).to_json() if vision is not None else None,
            "n": count,
        }
        for one, tokens in zip(examples, tokenizer.encode(examples), strict=True)
    ]
    asked = json.dumps({"config": config.model_dump(mode="json"), "device": "cpu", "questions": questions})
    answers: list[list[str]] = [[] for _ in examples]
    with closing(stream_program(ROLLOUT_OFFLINE, [], asked, seconds=ANSWER_SECONDS)) as found:
        for answer in found:
            answers[answer["question"]].append(answer["text"])
    return answers


def _rewards(samples: Sequence[RewardInput], outcomes: Sequence[dict[str, Any]], is_right: bool) -> list[float]:
    return [
        outcome["reward"]
        for sample, outcome in zip(samples, outcomes, strict=True)
        if "reward" in outcome and _is_reference(sample) == is_right
    ]


def _is_reference(sample: RewardInput) -> bool:
    return sample.response in references(sample.answer)


def _print_scores(samples: Sequence[RewardInput], outcomes: Sequence[dict[str, Any]], console: Console) -> None:
    """Print for each prompt a table of its answers with their rewards."""
    for prompt, scored in groupby(zip(samples, outcomes, strict=True), key=lambda pair: pair[0].prompt):
        table = Table(title=_shown(prompt), title_justify="left", header_style="dim", box=None, pad_edge=False)
        table.add_column("answer", min_width=24)
        table.add_column("reward", justify="right")
        table.add_column("seconds", justify="right")
        table.add_column("parts")
        for sample, outcome in scored:
            kind = " (reference)" if sample.response and _is_reference(sample) else ""
            table.add_row(
                (_shown(sample.response) or "(empty)") + kind,
                f"{outcome['reward']:g}" if "reward" in outcome else "failed" if outcome.get("tried", True) else "-",
                f"{outcome['seconds']:.3f}",
                ", ".join(f"{name} {value:g}" for name, value in outcome.get("parts", {}).items()),
            )
        console.print(table, "")


def _print_errors(outcomes: Sequence[dict[str, Any]], console: Console) -> None:
    errors = dict.fromkeys((one["error"], one["traceback"]) for one in outcomes if "error" in one)
    for error, traceback in errors:
        console.print(escape(error), style="bold red", soft_wrap=True)
        if traceback:
            console.print(traceback, soft_wrap=True)


def _shown(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else line[: SHOWN - 1] + "…"
