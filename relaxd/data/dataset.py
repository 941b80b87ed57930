"""A prompt data set that can be read from any cursor on."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from relaxd.config import RunConfig
from relaxd.data.addition import addition
from relaxd.data.errors import DataError
from relaxd.data.examples import Example
from relaxd.data.jsonl import read_jsonl
from relaxd.data.models import resolve_model, routed_expert_bytes
from relaxd.data.reasoning_gym import reasoning_gym
from relaxd.data.tokens import PromptTokenizer

CHECK_BATCH = 1024


Place = tuple[int, int]
"""A place in the endless sequence of prompts: an epoch, and a position in it."""


@dataclass(frozen=True)
class Cursor:
    """How far the endless sequence of prompts has been visited: to the position-th prompt of an epoch.

    The last two fields are empty but in a run whose board was lost: prompts were under way then.
    """

    epoch: int = 0
    position: int = 0
    again: tuple[Place, ...] = ()
    """Places before this one that are to be visited first, once more."""
    done: tuple[Place, ...] = ()
    """Places from this one on that have been visited, in order; never the place itself."""

    @property
    def place(self) -> Place:
        """The place to visit next."""
        return self.again[0] if self.again else (self.epoch, self.position)

    def to_json(self) -> dict[str, Any]:
        """As it is kept on the board."""
        detours = {"again": self.again, "done": self.done}
        return {"epoch": self.epoch, "position": self.position} | {name: v for name, v in detours.items() if v}

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """From the board; None is the beginning."""
        if value is None:
            return cls()
        again, done = (tuple((e, p) for e, p in value.get(name, ())) for name in ("again", "done"))
        return cls(value["epoch"], value["position"], again, done)


@dataclass(frozen=True)
class Prompt:
    """A prompt, ready to be published."""

    tokens: np.ndarray
    """Token ids, int32 [P]."""
    text: str
    """As shown to people."""
    answer: str
    """The reference answer."""
    metadata: dict[str, Any]
    """The line's other fields."""
    index: int
    """Its place in the data set; the same in every epoch."""

    def to_json(self) -> dict[str, Any]:
        """The board's `prompt` column."""
        return {"text": self.text, "answer": self.answer, "metadata": self.metadata, "index": self.index}


class PromptDataset:
    """Prompts of one source; each epoch visits every one of them once, in an order given by the seed alone."""

    def __init__(self, examples: Sequence[Example], tokenizer: PromptTokenizer, *, shuffle: bool, seed: int) -> None:
        self._examples = examples
        self._tokenizer = tokenizer
        self._shuffle = shuffle
        self._seed = seed
        self._order: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self._examples)

    def prompt(self, index: int) -> Prompt:
        """The prompt at a place of the data set."""
        example = self._examples[index]
        (tokens,) = self._tokenizer.encode([example])
        return Prompt(tokens, example.text, example.answer, example.metadata, index)

    def at(self, cursor: Cursor) -> Prompt:
        """The prompt to visit next."""
        epoch, position = cursor.place
        return self.prompt(int(self._epoch_order(epoch)[position]))

    def after(self, cursor: Cursor) -> Cursor:
        """The cursor once the next prompt was visited."""
        if cursor.again:
            return replace(cursor, again=cursor.again[1:])
        return self._past_done(self._next((cursor.epoch, cursor.position)), cursor.done)

    def resumed(self, cursor: Cursor, open_places: Collection[Place], done: Collection[Place]) -> Cursor:
        """A cursor that visits every place once that is neither before another one nor done, and those that were open.

        Args:
            cursor: how far prompts had been visited.
            open_places: places before it that have to be visited once more.
            done: places, wherever, that must not be.
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
    """What is trained on."""
    held_out: PromptDataset | None
    """What evaluations ask; None where the source has nothing held out."""
    skipped: int
    """Prompts that were left out because they are too long."""
    tokenizer: PromptTokenizer
    """The model's tokenizer."""
    expert_bytes: int = 0
    """Bytes of the routed experts that a run keeps of each token."""


def load_data(config: RunConfig) -> RunData:
    """Read, template, tokenise and check everything that a run will ask.

    Raises DataError: naming the setting and the line that is wrong.
    """
    folder = resolve_model(config.model.path, weights=False)
    tokenizer = PromptTokenizer(folder, config.model.chat_template)
    data = config.data
    held_out_field = "data.eval_path"
    held_out: list[Example] = []
    if data.source == "addition":
        field = "data"
        train, held_out = addition(data.digits)
    elif data.source == "reasoning_gym":
        field = held_out_field = "data.reasoning_gym"
        train, held_out = reasoning_gym(data.reasoning_gym)
    else:
        field = "data.path"
        assert data.path is not None  # the configuration refuses it
        train = read_jsonl(data.path, field)
        if data.eval_path is not None:
            held_out = read_jsonl(data.eval_path, held_out_field)
    kept = _fitting(train, tokenizer, config, field)
    kept_held_out = _fitting(held_out, tokenizer, config, held_out_field)
    return RunData(
        train=PromptDataset(kept, tokenizer, shuffle=data.shuffle, seed=config.run.seed),
        held_out=PromptDataset(kept_held_out, tokenizer, shuffle=False, seed=0) if kept_held_out else None,
        skipped=len(train) - len(kept) + len(held_out) - len(kept_held_out),
        tokenizer=tokenizer,
        expert_bytes=routed_expert_bytes(folder) if config.rollout.return_routed_experts else 0,
    )


def _fitting(examples: list[Example], tokenizer: PromptTokenizer, config: RunConfig, field: str) -> list[Example]:
    """The examples that are no longer than the budget."""
    most = config.data.max_prompt_tokens
    kept = []
    for start in range(0, len(examples), CHECK_BATCH):
        batch = examples[start : start + CHECK_BATCH]
        for example, tokens in zip(batch, tokenizer.encode(batch), strict=True):
            if len(tokens) <= most:
                kept.append(example)
            elif config.data.overlong == "error":
                raise DataError(
                    field,
                    f"{example.place} has {len(tokens)} tokens, more than data.max_prompt_tokens = {most}: raise that, "
                    'or set data.overlong = "skip"',
                )
    if examples and not kept:
        raise DataError(field, f"every prompt is longer than data.max_prompt_tokens = {most}")
    return kept
