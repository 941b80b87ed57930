"""Settings of conversations with an environment, or of a program with the model."""

import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from relaxd.config.section import Section, own_function
from relaxd.importing import OWN_NAME

BUNDLED_NAME = re.compile(r"[a-z][a-z0-9_]*")
"""Matches the name of a bundled environment."""
SERVICE = "grpc://"
"""Prefix of the address of an environment that is a service."""
ADDRESS = re.compile(rf"{SERVICE}[^\s/@:]+:[1-9][0-9]{{0,4}}")
"""Matches the address of an environment service, such as "grpc://host:50070"."""


def check_environment(name: str) -> str:
    """Return `name` if it can name an environment: a bundled one, a class or an address; "" is allowed.

    Raises ValueError for any other text.
    """
    if not name or BUNDLED_NAME.fullmatch(name) or OWN_NAME.fullmatch(name):
        return name
    if ADDRESS.fullmatch(name) and int(name.rpartition(":")[2]) < 65536:
        return name
    raise ValueError(
        f'{name!r} must be the name of a bundled environment, "package.module:Class", "file.py:Class", or the '
        'address of a service, "grpc://host:port"'
    )


class AgentConfig(Section):
    """Conversations with an environment, or led by a program (docs/agents.md)."""

    section: ClassVar[str] = "agent"

    environment: Annotated[str, AfterValidator(check_environment)] = ""
    """Environment that the model talks to: a bundled name (docs/environments.md lists them), "file.py:Class",
    "package.module:Class", or "grpc://host:port", a service that speaks relaxd.v1.Environment
    (protos/relaxd/v1/environment.proto). Empty, without agent.command and agent.function: each
    prompt gets one answer."""
    command: tuple[str, ...] = ()
    """Program, with its arguments, that leads the conversations in place of an environment. It is started once for each
    sample, and asks the model over HTTP at OPENAI_BASE_URL."""
    container: str = ""
    """Image of the containers in which agent.command runs, one for each sample. A container can reach only the model.
    The agent service's machine needs a Docker engine that has the image. Empty: processes of the service's user."""
    container_memory_gb: float = Field(default=2.0, gt=0)
    """Maximum memory of each container, in GB."""
    container_processes: int = Field(default=256, ge=1)
    """Maximum number of processes and threads in each container."""
    function: Annotated[str, own_function("agent.function")] = ""
    """Async function that leads the conversations in place of an environment, "file.py:solve" or
    "package.module:solve". It gets the sample and the model, may call the model any number of times, and returns the
    reward."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of the environment or the function: keyword arguments of its class, or of the function."""
    media: tuple[Literal["image", "video", "audio"], ...] = ()
    """Kinds of media, besides those of data.media_keys, that prompts and the messages of the environment, program or
    function may have (docs/media.md)."""
    max_turns: int = Field(default=8, ge=1)
    """Maximum number of the model's messages in a conversation, over all of its histories."""
    turn_tokens: int = Field(default=0, ge=0)
    """Maximum length of a message of the model, in tokens; a longer message ends its conversation. 0: what is left of
    rollout.max_new_tokens, which limits a whole conversation after its prompt (a program's: each history), observations
    included."""
    players: int = Field(default=1, ge=1, le=64)
    """Number of players that the model plays in an environment. Each has a separate history, and sees only what the
    environment says to it."""
    credit: Literal["sample", "sequence", "step"] = "sample"
    """Rewards from which advantages are computed. sample: all players get the conversation's reward, the sum of the
    players' rewards. sequence: each player gets its own reward, compared with the same player's in the group. step:
    each message of the model gets its player's rewards from then on, compared with those of the message of the same
    number in the group's other conversations."""
    max_sequences: int = Field(default=16, ge=1, le=1000)
    """Maximum number of histories of a program's or a function's sample: each request that doesn't continue one begins
    another, such as a compacted history or a sub-agent's."""
    call_seconds: float = Field(default=30.0, gt=0)
    """Maximum duration of a call of the environment, in seconds; for a function conversation_seconds applies."""
    conversation_seconds: float = Field(default=1800.0, gt=0)
    """Maximum duration of a conversation, in seconds. Time in which no engine is available doesn't count."""
    on_failure: Literal["drop", "zero", "mask", "retry"] = "drop"
    """Treatment of a conversation whose environment raised or took too long, or whose program ended with an exit
    code other than 0. drop: drop its group. zero: its reward is 0. mask: its reward is 0, and it isn't trained on.
    retry: repeat it from its beginning, up to max_retries times with growing pauses, then drop its group."""
    max_retries: int = Field(default=3, ge=1)
    """Maximum number of times that a failed conversation is repeated, with on_failure = "retry"."""
    max_sessions: int = Field(default=256, ge=1)
    """Maximum number of concurrent conversations of an agent replica."""
    memory_bytes: int = Field(default=0, ge=0)
    """Maximum memory of the process that hosts the environment, or the function, for all of its conversations
    (RLIMIT_DATA: what it allocates, and 8 MiB for each of its threads). A process that uses it up is restarted, and its
    conversations fail. 0: no limit."""
    python: str = ""
    """Python interpreter that runs the environment or the function, such as that of a virtual environment. Empty: the
    service's own."""

    @property
    def is_there(self) -> bool:
        """True if the run's samples are conversations."""
        return bool(self.environment or self.command or self.function)

    @property
    def shown(self) -> str:
        """Text for messages with the setting that makes the samples conversations, such as agent.environment is "…"."""
        if self.command:
            return f"agent.command is {json.dumps(self.command)}"
        if self.function:
            return f'agent.function is "{self.function}"'
        return f'agent.environment is "{self.environment}"'

    @property
    def sequences(self) -> int:
        """Maximum number of sequences of tokens that a sample has."""
        return self.max_sequences if self.command or self.function else self.players

    @property
    def is_service(self) -> bool:
        """True if the environment is a service at an address."""
        return self.environment.startswith(SERVICE)

    def problems(self) -> Iterator[str]:
        if self.environment and (self.command or self.function):
            yield (
                f'agent.environment is "{self.environment}", and {self.shown}: a conversation has one of them; '
                "remove the other"
            )
        if self.command and self.function:
            yield (
                f'agent.function is "{self.function}", and {self.shown}: a conversation has one of them; remove the '
                "other"
            )
        if self.container and any(letter.isspace() for letter in self.container):
            yield f'agent.container is "{self.container}": it must be an image, such as "python:3.11-slim"'
        if self.command and not self.container:
            reason = 'agent.container is empty: name an image, such as "python:3.11-slim", or remove it'
            yield from self.unused(("container_memory_gb", "container_processes"), reason)
        if self.command:
            if not self.command[0] or any("\0" in word for word in self.command):
                yield f"{self.shown}: it must begin with a program, and no word may have a null character"
            reason = f"{self.shown}: only environments have it; remove it"
            yield from self.unused(("settings", "python", "memory_bytes", "call_seconds", "players", "credit"), reason)
        elif self.is_there and (given := self.changed(("container", "container_memory_gb", "container_processes"))):
            yield f"agent.{given[0]} is set, but {self.shown}: only agent.command has it; remove it"
        elif self.function:
            reason = f"{self.shown}: only environments have it; remove it"
            yield from self.unused(("call_seconds", "players", "credit"), reason)
        elif not self.environment:
            reason = "agent.environment is empty: name it (or agent.command or agent.function), or remove it"
            yield from self.unused(type(self).model_fields, reason)
        elif self.is_service and (given := self.changed(("python", "settings", "memory_bytes"))):
            yield (
                f'agent.{given[0]} is set, but agent.environment is "{self.environment}", a service that runs already: '
                f"remove agent.{given[0]}"
            )
        if self.environment:
            reason = f"{self.shown}: only programs and functions have it; remove it"
            yield from self.unused(("max_sequences",), reason)
        if self.environment and self.players == 1 and self.credit != "step":
            yield from self.unused(("credit",), "agent.players is 1: set it to the number of players")
        if self.is_there and self.on_failure != "retry":
            reason = f'agent.on_failure is "{self.on_failure}": set "retry"'
            yield from self.unused(("max_retries",), reason)
