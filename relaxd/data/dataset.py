"""A prompt data set that can be read from any cursor."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from relaxd.config import RunConfig
from relaxd.data.addition import addition
from relaxd.data.errors import DataError
from relaxd.data.examples import Example, Message
from relaxd.data.jsonl import read_jsonl
from relaxd.data.models import resolve_model, routed_expert_bytes
from relaxd.data.reasoning_gym import reasoning_gym
from relaxd.data.tokenizer import PromptTokenizer

CHECK_BATCH = 1024


Place = tuple[int, int]
"""A place in the infinite sequence of prompts: epoch and position."""


@dataclass(frozen=True)
class Cursor:
    """Position in the infinite sequence of prompts.

    `again` and `done` are empty except after a run was restored without its board, when groups were open.
    """

    epoch: int = 0
    position: int = 0
    again: tuple[Place, ...] = ()
    """Earlier places to visit again, first."""
    done: tuple[Place, ...] = ()
    """Later places that were visited already, in order."""

    @property
    def place(self) -> Place:
        """The place to visit next."""
        return self.again[0] if self.again else (self.epoch, self.position)

    def to_json(self) -> dict[str, Any]:
        """Return the cursor as JSON for the board."""
        detours = {"again": self.again, "done": self.done}
        return {"epoch": self.epoch, "position": self.position} | {name: v for name, v in detours.items() if v}

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Parse a cursor from the board; None is the start."""
        if value is None:
            return cls()
        again, done = (tuple((e, p) for e, p in value.get(name, ())) for name in ("again", "done"))
        return cls(value["epoch"], value["position"], again, done)


@dataclass(frozen=True)
class Prompt:
    """A prompt to publish."""

    tokens: np.ndarray
    """Token ids, int32 [P]."""
    text: str
    """Text for display."""
    answer: str
    """The reference answer."""
    metadata: dict[str, Any]
    """Other fields of the line."""
    index: int
    """Index in the data set, the same in every epoch."""
    messages: list[Message] = field(default_factory=list)
    """The conversation, unless it is one message of the user with that text."""

    def to_json(self) -> dict[str, Any]:
        """Return the board's `prompt` column."""
        messages = {"messages": self.messages} if self.messages else {}
        return {"text": self.text, **messages, "answer": self.answer, "metadata": self.metadata, "index": self.index}


class PromptDataset:
    """Prompts of one source. Each epoch visits each of them once, in an order that depends on the seed alone."""

    def __init__(self, examples: Sequence[Example], tokenizer: PromptTokenizer, *, shuffle: bool, seed: int) -> None:
        self._examples = examples
        self._tokenizer = tokenizer
        self._shuffle = shuffle
        self._seed = seed
        self._order: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self._examples)

    def prompt(self, index: int) -> Prompt:
        """Return the prompt at an index."""
        example = self._examples[index]
        (tokens,) = self._tokenizer.encode([example])
        messages = [] if isinstance(example.prompt, str) else example.prompt
        return Prompt(tokens, example.text, example.answer, example.metadata, index, messages)

    def at(self, cursor: Cursor) -> Prompt:
        """Return the next prompt."""
        epoch, position = cursor.place
        return self.prompt(int(self._epoch_order(epoch)[position]))

    def after(self, cursor: Cursor) -> Cursor:
        """Return the cursor after the next prompt."""
        if cursor.again:
            return replace(cursor, again=cursor.again[1:])
        return self._past_done(self._next((cursor.epoch, cursor.position)), cursor.done)

    def resumed(self, cursor: Cursor, open_places: Collection[Place], done: Collection[Place]) -> Cursor:
        """Return the cursor to resume from: open prompts first, completed ones skipped.

        Args:
            cursor: the position at the interruption.
            open_places: earlier places to visit again.
            done: places to skip.
        """
        here = (cursor.epoch, cursor.position)
        again = {*cursor.again, *(place for place in open_places if place < here)} - set(done)
        after = sorted(place for place in {*cursor.done, *done} if place >= here)
        return replace(self._past_done(here, tuple(after)), again=tuple(sorted(again)))

    def _next(self, place: Place) -> Place:
        epoch, position = place
        return (epoch + 1, 0) if position + 1 == len(self) else (epoch, position + 1)

    def _past_done(self, place: Place, done: tuple[Place, ...]) -> Cursor:
        while done and done[0] == place:
            place, done = self._next(place), done[1:]
        return Cursor(*place, done=done)

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if self._order is None or self._order[0] != epoch:
            rng = np.random.default_rng((self._seed, epoch))
            order = rng.permutation(len(self)) if self._shuffle else np.arange(len(self))
            self._order = (epoch, order)
        return self._order[1]


@dataclass(frozen=True)
class RunData:
    """The data of a run."""

    train: PromptDataset
    """Training prompts."""
    held_out: PromptDataset | None
    """Held-out prompts for evaluations; None if the source has none."""
    skipped: int
    """Number of prompts left out because they are too long."""
    tokenizer: PromptTokenizer
    """The model's tokenizer."""
    expert_bytes: int = 0
    """Bytes per token of routed experts, if the run stores them."""


SETTINGS = {
    "addition": ("data", "data"),
    "reasoning_gym": ("data.reasoning_gym", "data.reasoning_gym"),
    "jsonl": ("data.path", "data.eval_path"),
}
"""The settings that training and held-out prompts of each source come from."""


def read_examples(config: RunConfig) -> tuple[list[Example], list[Example]]:
    """Read the training prompts of a run and the held-out ones, without the model.

    Raises DataError, which names the setting and the line.
    """
    data = config.data
    if data.source == "addition":
        return addition(data.digits)
    if data.source == "reasoning_gym":
        return reasoning_gym(data.reasoning_gym)
    assert data.path is not None  # checked by the configuration
    field, held_out_field = SETTINGS["jsonl"]
    held_out = [] if data.eval_path is None else read_jsonl(data.eval_path, held_out_field)
    return read_jsonl(data.path, field), held_out


def load_data(config: RunConfig) -> RunData:
    """Read, template, tokenise and check all prompts of a run.

    Raises DataError, which names the setting and the line.
    """
    folder = resolve_model(config.model.path, weights=False)
    tokenizer = PromptTokenizer(folder, config.model.chat_template)
    field, held_out_field = SETTINGS[config.data.source]
    train, held_out = read_examples(config)
    kept = _fitting(train, tokenizer, config, field)
    kept_held_out = _fitting(held_out, tokenizer, config, held_out_field)
    return RunData(
        train=PromptDataset(kept, tokenizer, shuffle=config.data.shuffle, seed=config.run.seed),
        held_out=PromptDataset(kept_held_out, tokenizer, shuffle=False, seed=0) if kept_held_out else None,
        skipped=len(train) - len(kept) + len(held_out) - len(kept_held_out),
        tokenizer=tokenizer,
        expert_bytes=routed_expert_bytes(folder) if config.rollout.return_routed_experts else 0,
    )


def _fitting(examples: list[Example], tokenizer: PromptTokenizer, config: RunConfig, field: str) -> list[Example]:
    """Return the examples within data.max_prompt_tokens. Raises DataError unless longer ones may be skipped."""
    limit = config.data.max_prompt_tokens
    kept = []
    for start in range(0, len(examples), CHECK_BATCH):
        batch = examples[start : start + CHECK_BATCH]
        for example, tokens in zip(batch, tokenizer.encode(batch), strict=True):
            if len(tokens) <= limit:
                kept.append(example)
            elif config.data.overlong == "error":
                raise DataError(
                    field,
                    f"{example.place} has {len(tokens)} tokens, more than data.max_prompt_tokens = {limit}: raise it, "
                    'or set data.overlong = "skip"',
                )
    if examples and not kept:
        raise DataError(field, f"every prompt is longer than data.max_prompt_tokens = {limit}")
    return kept
