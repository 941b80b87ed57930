"""`relaxd env test`: a conversation with an environment, with replies from the command line."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import grpc
import typer
from rich.console import Console

from relaxd.cli.options import PASS_ON, data_errors, load_words, new_console
from relaxd.cli.preparing.reward_command import first_prompts
from relaxd.client import CliError
from relaxd.config.agent import SERVICE, check_environment
from relaxd.config.load_toml import ConfigError, Problem
from relaxd.data.examples import Message
from relaxd.data.vision import normalise, read_vision
from relaxd.envs.client import EnvironmentClient, EnvironmentFailed, hosted
from relaxd.envs.environment import BadEnvironmentError, Reply, Sample
from relaxd.envs.observation_media import with_media
from relaxd.envs.replies import REPLY_FORMATS, parse_reply
from relaxd.evaluation.set_checks import environment_problems
from relaxd.media.placeholders import shown_text
from relaxd.media.prompt_media import StoredMedia
from relaxd.models.folders import resolve_model
from relaxd.process.child import ChildError
from relaxd.rpc.client import channel
from relaxd.text import parse_json

HERMES = next(one for one in REPLY_FORMATS if one.name == "hermes")
DEFAULT_REPLIES = ("I don't know.",)

MAX_TURNS = 10**6
"""Maximum number of replies in a conversation with an environment that is tried without a run's configuration."""

env_app = typer.Typer(help="Try an environment.", no_args_is_help=True)


@dataclass(frozen=True)
class _Trial:
    """Trial conversation with an environment: its settings, its prompt and its limits."""

    environment: str
    settings: dict[str, Any] = field(default_factory=dict)
    python: str = ""
    """Python interpreter that runs the environment; "": the interpreter of this process."""
    sample: Sample = field(default_factory=lambda: Sample([{"role": "user", "content": "Begin."}]))
    call_seconds: float = 30.0
    max_turns: int = MAX_TURNS


@env_app.command("test", context_settings=PASS_ON)
def env_test(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="ENVIRONMENT | FILE.toml [--section.key VALUE]...",
            help='A bundled environment, "file.py:Class", "package.module:Class" or grpc://HOST:PORT; or the '
            "configuration of a run, whose environment talks about the first prompt of its data.",
        ),
    ],
    reply: Annotated[
        list[str] | None,
        typer.Option(
            help='A message of the model, with calls as <tool_call>{"name": ..., "arguments": {...}}</tool_call>.'
        ),
    ] = None,
    settings: Annotated[list[str] | None, typer.Option(help="A setting of the environment, KEY=VALUE.")] = None,
    prompt: Annotated[str | None, typer.Option(help="The prompt; by default the run's first, or Begin.")] = None,
    answer: Annotated[str | None, typer.Option(help="The reference answer.")] = None,
    metadata: Annotated[str | None, typer.Option(help="The prompt's other fields, as a JSON object.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the environment's state.")] = None,
    call_seconds: Annotated[
        float | None, typer.Option(min=0.001, help="Time for each call of the environment; by default 30 s.")
    ] = None,
) -> None:
    """Play one conversation with an environment, with given replies, and show it turn by turn."""
    trial = _trial_of_run(words) if words[0].endswith(".toml") else _trial_of_name(words)
    given: dict[str, Any] = {
        "messages": None if prompt is None else [{"role": "user", "content": prompt}],
        "answer": answer,
        "metadata": None if metadata is None else _object("--metadata", metadata),
        "seed": seed,
    }
    trial = replace(
        trial,
        settings=trial.settings | _settings(trial.environment, settings or []),
        sample=replace(trial.sample, **{name: value for name, value in given.items() if value is not None}),
        call_seconds=call_seconds or trial.call_seconds,
    )
    replies = [_reply(text) for text in reply or DEFAULT_REPLIES]
    try:
        asyncio.run(_play(trial, replies, new_console()))
    except (BadEnvironmentError, EnvironmentFailed, ChildError) as error:
        raise CliError(str(error)) from error


def _trial_of_name(words: Sequence[str]) -> _Trial:
    """Return a trial of the environment that a name or address gives, without a run's configuration.

    Raises CliError: a wrong address, or extra words.
    """
    name, *others = words
    if others:
        raise CliError(f"{others[0]}: there is no such option for an environment; settings are for FILE.toml")
    try:
        return _Trial(check_environment(name) if name.startswith(SERVICE) else name)
    except ValueError as error:
        raise CliError(str(error)) from error


def _trial_of_run(words: list[str]) -> _Trial:
    """Return a trial of a run's environment with the first prompt of the run's data. Raises ConfigError, CliError."""
    path, config = load_words(words)
    agent = config.agent
    if not agent.environment:
        raise CliError(f"{path}: agent.environment is empty, so that the run has no conversations with an environment")
    if problem := config.media_problem:
        raise ConfigError([Problem(*problem)])
    if problems := environment_problems(config):
        raise ConfigError([Problem(setting, message) for setting, message in problems])
    first = first_prompts(config)[0]
    messages = first.messages
    if first.media:
        with data_errors():
            vision = read_vision(resolve_model(config.model.path), config.data, config.media_kinds)
            messages = with_media(messages, [StoredMedia.of(one).uri for one in normalise(first, vision)])
    return _Trial(
        agent.environment,
        agent.settings,
        agent.python,
        Sample(messages, first.answer, first.metadata, config.run.seed),
        agent.call_seconds,
        agent.max_turns,
    )


async def _play(trial: _Trial, replies: Sequence[Reply], console: Console) -> None:
    """Play a trial conversation with these replies, and print it turn by turn.

    Raises BadEnvironmentError, EnvironmentFailed, ChildError.
    """
    async with _channel_to(trial) as to:
        client = EnvironmentClient(to, trial.call_seconds, lease_seconds=600.0)
        session = f"test-{uuid.uuid4().hex}"
        opened = await client.open(session, trial.sample)
        for tool in opened.tools:
            console.print(f"tool {json.dumps(tool['function'], ensure_ascii=False)}", style="dim", soft_wrap=True)
        _show([*trial.sample.messages, *opened.messages], console)
        player, rewards, info, ending = 0, 0.0, dict[str, float](), "the replies are used up: give more with --reply"
        for turn, reply in enumerate(replies, 1):
            calls = [{"name": call.name, "arguments": call.arguments} for call in reply.tool_calls]
            said = [reply.text, *(json.dumps(call, ensure_ascii=False) for call in calls), reply.problem]
            _show([{"role": "assistant", "content": "\n".join(filter(None, said))}], console)
            step = await client.step(session, turn, reply)
            _show(step.messages, console)
            rewards, info = rewards + step.reward + sum(step.rewards.values()), {**info, **step.info}
            others = "".join(f", player {other}: {reward:g}" for other, reward in sorted(step.rewards.items()))
            speaks = f", player {step.player} is next" if step.player != player and not step.done else ""
            player = step.player
            done = ", done" if step.done else ""
            console.print(f"turn {turn}: reward {step.reward:g}{others}{speaks}{done}", style="dim")
            if step.done or not step.messages:
                ending = "the environment ended it" if step.done else "it has no observation, which ends it"
                break
            if turn == trial.max_turns:
                ending = f"agent.max_turns is {turn}"
                break
        await client.close_session(session)
        numbers = "".join(f", {key} {value:g}" for key, value in sorted(info.items()))
        console.print(f"reward {rewards:g}{numbers} ({ending})", style="bold", soft_wrap=True)


@asynccontextmanager
async def _channel_to(trial: _Trial) -> AsyncIterator[grpc.aio.Channel]:
    if not trial.environment.startswith(SERVICE):
        async with hosted(trial.environment, trial.settings, trial.python) as to:
            yield to
    else:
        async with channel(trial.environment.removeprefix(SERVICE), token="", stack="") as to:
            yield to


def _show(messages: Sequence[Message], console: Console) -> None:
    for message in messages:
        text = shown_text(message["content"])
        console.print(f"[{message['role']}] {text}", markup=False, highlight=False, soft_wrap=True)


def _reply(text: str) -> Reply:
    parsed = parse_reply(text, HERMES)
    return Reply(parsed.text, parsed.calls, parsed.problem)


def _settings(name: str, words: Sequence[str]) -> dict[str, Any]:
    """Parse NAME=VALUE words into settings of the environment; a value that isn't JSON is text. Raises CliError."""
    if words and name.startswith(SERVICE):
        raise CliError(f"--settings {words[0]}: an environment at an address has settings of its own")
    found: dict[str, Any] = {}
    for word in words:
        key, is_there, value = word.partition("=")
        if not is_there or not key.isidentifier():
            raise CliError(f"--settings {word}: it must be KEY=VALUE")
        try:
            found[key] = parse_json(value)
        except ValueError:
            found[key] = value
    return found


def _object(option: str, text: str) -> dict[str, Any]:
    try:
        found = parse_json(text)
    except ValueError as error:
        raise CliError(f"{option} isn't JSON: {error}") from error
    if not isinstance(found, dict):
        raise CliError(f"{option} is {text}: it must be a JSON object")
    return found
