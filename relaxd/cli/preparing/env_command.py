"""`relaxd env test`: a conversation with an environment, with replies from the command line."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any

import grpc
import typer
from rich.console import Console

from relaxd.cli.options import new_console
from relaxd.client import CliError
from relaxd.config.agent import SERVICE
from relaxd.data.examples import Message
from relaxd.envs.client import EnvironmentClient, EnvironmentFailed, hosted
from relaxd.envs.environment import BadEnvironmentError, Reply, Sample
from relaxd.envs.replies import parse_reply
from relaxd.envs.reply_formats import REPLY_FORMATS
from relaxd.json_text import parse_json
from relaxd.process.child import ChildError
from relaxd.rpc.client import channel

HERMES = next(one for one in REPLY_FORMATS if one.name == "hermes")
DEFAULT_REPLIES = ("I don't know.",)

env_app = typer.Typer(help="Try an environment.", no_args_is_help=True)


@env_app.command("test")
def env_test(
    name: Annotated[
        str,
        typer.Argument(help='A bundled environment, "file.py:Class", "package.module:Class" or grpc://HOST:PORT.'),
    ],
    reply: Annotated[
        list[str] | None,
        typer.Option(
            help='A message of the model, with calls as <tool_call>{"name": ..., "arguments": {...}}</tool_call>.'
        ),
    ] = None,
    settings: Annotated[list[str] | None, typer.Option(help="A setting of the environment, KEY=VALUE.")] = None,
    prompt: Annotated[str, typer.Option(help="The prompt.")] = "Begin.",
    answer: Annotated[str, typer.Option(help="The reference answer.")] = "",
    metadata: Annotated[str, typer.Option(help="The prompt's other fields, as a JSON object.")] = "{}",
    seed: Annotated[int, typer.Option(help="Seed of the environment's state.")] = 0,
    call_seconds: Annotated[float, typer.Option(min=0.001, help="Time for each call of the environment.")] = 30.0,
) -> None:
    """Play one conversation with an environment, with given replies, and show it turn by turn."""
    sample = Sample([{"role": "user", "content": prompt}], answer, _object("--metadata", metadata), seed)
    replies = [_reply(text) for text in reply or DEFAULT_REPLIES]
    chosen = _settings(name, settings or [])
    try:
        asyncio.run(_play(name, chosen, sample, replies, call_seconds, new_console()))
    except (BadEnvironmentError, EnvironmentFailed, ChildError) as error:
        raise CliError(str(error)) from error


async def _play(
    name: str, settings: dict[str, Any], sample: Sample, replies: Sequence[Reply], call_seconds: float, console: Console
) -> None:
    """Play and show a conversation. Raises BadEnvironmentError, EnvironmentFailed, ChildError."""
    async with _channel_to(name, settings) as to:
        client = EnvironmentClient(to, call_seconds, lease_seconds=600.0)
        session = f"test-{uuid.uuid4().hex}"
        opened = await client.open(session, sample)
        for tool in opened.tools:
            console.print(f"tool {json.dumps(tool['function'], ensure_ascii=False)}", style="dim", soft_wrap=True)
        _show([*sample.messages, *opened.messages], console)
        rewards, info, ending = 0.0, dict[str, float](), "the replies are used up: give more with --reply"
        for turn, reply in enumerate(replies, 1):
            calls = [{"name": call.name, "arguments": call.arguments} for call in reply.tool_calls]
            said = [reply.text, *(json.dumps(call, ensure_ascii=False) for call in calls), reply.problem]
            _show([{"role": "assistant", "content": "\n".join(filter(None, said))}], console)
            step = await client.step(session, turn, reply)
            _show(step.messages, console)
            rewards, info = rewards + step.reward, {**info, **step.info}
            console.print(f"turn {turn}: reward {step.reward:g}{', done' if step.done else ''}", style="dim")
            if step.done or not step.messages:
                ending = "the environment ended it" if step.done else "it has no observation, which ends it"
                break
        await client.close_session(session)
        numbers = "".join(f", {key} {value:g}" for key, value in sorted(info.items()))
        console.print(f"reward {rewards:g}{numbers} ({ending})", style="bold", soft_wrap=True)


@asynccontextmanager
async def _channel_to(name: str, settings: dict[str, Any]) -> AsyncIterator[grpc.aio.Channel]:
    if not name.startswith(SERVICE):
        async with hosted(name, settings) as to:
            yield to
    else:
        async with channel(name.removeprefix(SERVICE), token="", stack="") as to:
            yield to


def _show(messages: Sequence[Message], console: Console) -> None:
    for message in messages:
        console.print(f"[{message['role']}] {message['content']}", markup=False, highlight=False, soft_wrap=True)


def _reply(text: str) -> Reply:
    parsed = parse_reply(text, HERMES)
    return Reply(parsed.text, parsed.calls, parsed.problem)


def _settings(name: str, words: Sequence[str]) -> dict[str, Any]:
    """Return the settings; a value that is JSON counts as such, another one as text. Raises CliError."""
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
