"""A prompt data set that can be read from any cursor, and detection of changes in its data. A run that resumes compares
a digest of the data; each visit to a prompt compares hashes of its media."""

import hashlib
import json
import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from relaxd.config import RunConfig
from relaxd.data.duplicates import Chosen, FirstVisits, Seen, keys_of
from relaxd.data.examples import Example, Message
from relaxd.data.prompt_checks import (
    CHECKED,
    FIRST_LOOK,
    Limit,
    PrivilegedPrompts,
    check_source,
    check_teachers,
    check_tools,
    evenly_spread,
    privileged_prompts,
)
from relaxd.data.rows import Joined
from relaxd.data.sources.evaluation_sets import read_set
from relaxd.data.sources.prompt_columns import Examples
from relaxd.data.sources.run_sources import Share, Source, epoch_visits, mixture_weights, read_sources
from relaxd.data.tokenizer import PromptTokenizer
from relaxd.data.vision import MediaAhead
from relaxd.media.kinds import NormalMedia
from relaxd.media.prompt_media import NO_MEDIA, PromptMedia, with_references
from relaxd.models import DataError
from relaxd.models.folders import resolve_model, routed_expert_bytes
from relaxd.run_folder import COMPARED, HELD_OUT, VISITED_MEDIA

logger = logging.getLogger(__name__)

HASH_BYTES = 8
"""Length of the hash of a prompt's media in the file, in bytes."""
NAMED_ITEMS = 4
"""Maximum number of media items that a warning about a prompt names."""
NAMED_PROMPTS = 20
"""Maximum number of warnings about prompts with changed media. The last one says that further prompts aren't named."""


class MediaChanges:
    """Compares the media of each prompt with its media at the previous visit.

    The digest of the data covers only the paths and sizes of media files, because reading all contents would take too
    long. A file that was replaced by another of the same size is therefore detected here, when the prompt's media are
    read anyway. The hashes are stored in a file for a restarted coordinator: the digest, then one hash per prompt, 0 if
    the prompt wasn't visited.
    """

    def __init__(self, prompts: int, digest: str, path: Path) -> None:
        """Load the hashes from a file. Ignore them if the file belongs to data with another digest."""
        self._path: Path | None = path
        self._hashes = np.zeros(prompts, np.uint64)
        self._header = bytes.fromhex(digest)
        self._warned = 0
        try:
            content = path.read_bytes() if path.is_file() else b""
            if content.startswith(self._header):
                stored = content[len(self._header) :][: prompts * HASH_BYTES]
                found = np.frombuffer(stored[: len(stored) // HASH_BYTES * HASH_BYTES], np.uint64)
                self._hashes[: len(found)] = found
            else:
                path.write_bytes(self._header)
        except OSError as error:
            self._give_up(error)

    def look(self, index: int, example: Example, media: Sequence[NormalMedia]) -> None:
        """Warn if a prompt's media differ from those of its last visit, and store the hash of the new media."""
        names = "".join(one.sha256 for one in media).encode()
        found = np.uint64(int.from_bytes(hashlib.blake2b(names, digest_size=HASH_BYTES).digest(), "little") | 1)
        before, self._hashes[index] = self._hashes[index], found
        if before == found:
            return
        if before:
            self._warn(example)
        self._write(index)

    def _warn(self, example: Example) -> None:
        self._warned += 1
        if self._warned > NAMED_PROMPTS:
            return
        places = ", ".join(item.place for item in example.media[:NAMED_ITEMS])
        more = ", ..." if len(example.media) > NAMED_ITEMS else ""
        last = "; further prompts with changed media aren't named" if self._warned == NAMED_PROMPTS else ""
        logger.warning(
            "%s: its media (%s%s) aren't those of its visit before: new samples see the new ones, so files must stay "
            "as they are while a run needs them%s",
            *(example.place, places, more, last),
        )

    def _write(self, index: int) -> None:
        """Write a prompt's hash at its fixed offset in the file. Another live coordinator would write the same hash
        there."""
        if self._path is None:
            return
        try:
            file = os.open(self._path, os.O_WRONLY)
            try:
                os.pwrite(file, self._hashes[index].tobytes(), len(self._header) + index * HASH_BYTES)
            finally:
                os.close(file)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Log that the file of hashes can't be used. From then on, hashes are compared in memory only."""
        logger.warning(
            "%s can't be used, so media that change while the coordinator is down aren't found: %s", self._path, error
        )
        self._path = None


DIGEST_BYTES = 16
MADE = 512
"""Maximum number of prompts that are built from a large source for the digest, to detect changed code or columns."""


def digest_of(examples: Sequence[Example]) -> str:
    """Return a hash of all prompts, their answers, tools, sampling parameters and metadata, and of their order.

    Prompts in memory are hashed one by one. For sources that are read on demand, the hash covers the stored bytes, at
    about 1 GB per second, and some of the prompts.
    """
    found = hashlib.blake2b(f"{len(examples)}\n".encode(), digest_size=DIGEST_BYTES)
    for content in _contents(examples):
        found.update(content)
    return found.hexdigest()


def _contents(examples: Sequence[Example]) -> Iterator[bytes]:
    if isinstance(examples, Joined):
        for part in examples.parts:
            yield from _contents(part)
    elif isinstance(examples, Chosen):
        yield examples.places.tobytes()
        yield from _contents(examples.all)
    elif isinstance(examples, Examples):
        yield from examples.content()
        for index in evenly_spread(len(examples), MADE):
            try:
                yield _text(examples[index])
            except ValueError:  # a wrong row, which stops the run when its turn comes
                yield b"wrong\n"
    else:
        yield from map(_text, examples)


def _text(example: Example) -> bytes:
    """Return all fields of a prompt as text for the digest. The order of keys is kept where a chat template may write
    them."""
    media = [[_source(item.source) for item in example.media]] if example.media else []
    seen = json.dumps([example.prompt, example.answer, example.tools, example.sampling, *media], default=str)
    return f"{seen}{json.dumps(example.metadata, sort_keys=True, default=str)}\n".encode()


def _source(source: Any) -> Any:
    """Return a media item's source for the digest. A file's size is added, because reading its content would take too
    long."""
    if isinstance(source, list | tuple):  # a video's frames
        return [_source(one) for one in source]
    path = source.get("path") if isinstance(source, dict) and source.get("bytes") is None else source
    try:
        return [source, os.stat(path).st_size] if isinstance(path, str) else source
    except (OSError, ValueError):  # no file: base64, or one that is missing, which is refused when its turn comes
        return source


Place = tuple[int, int]
"""Place in the infinite sequence of prompts: number of the epoch, and position in the epoch."""


@dataclass(frozen=True)
class Cursor:
    """Position in the infinite sequence of prompts.

    `again` and `done` are empty unless a run was restored without its board while groups were open.
    """

    epoch: int = 0
    position: int = 0
    again: tuple[Place, ...] = ()
    """Earlier places that are visited again before the cursor goes on."""
    done: tuple[Place, ...] = ()
    """Later places that were visited already and are skipped, in order."""

    @property
    def place(self) -> Place:
        """Place of the prompt to visit next."""
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
    """A prompt to publish on the board."""

    tokens: np.ndarray
    """Token ids of the prompt, int32 [P]."""
    text: str
    """Text of the prompt for display."""
    answer: str
    """Reference answer of the prompt."""
    metadata: dict[str, Any]
    """Metadata of the prompt: further fields of its row in the data."""
    index: int
    """Index of the prompt in the data set, the same in every epoch."""
    messages: list[Message] = field(default_factory=list)
    """Messages of the prompt; empty if the prompt is a single user message, `text`."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Sampling parameters of the prompt's source that differ from the run's, by name, as JSON values."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """Tools that the chat template got, as a list of schemas."""
    teacher_tokens: np.ndarray | None = None
    """Token ids of the teacher's own prompt, int32; None if it has none."""
    media: PromptMedia = NO_MEDIA
    """Media of the prompt. The prompt's token ids include the media's tokens."""

    def to_json(self) -> dict[str, Any]:
        """Return the prompt as JSON for the board's column `prompt`."""
        messages = {"messages": self.messages} if self.messages else {}
        sampling = {"sampling": self.sampling} if self.sampling else {}
        tools = {"tools": self.tools} if self.tools else {}
        return {
            "text": self.text,
            **messages,
            "answer": self.answer,
            "metadata": self.metadata,
            "index": self.index,
            **sampling,
            **tools,
        }


class PromptDataset:
    """Prompts of one or several sources. Each epoch visits each prompt as often as its source's weight says, in an
    order that depends on the seed alone.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        tokenizer: PromptTokenizer,
        *,
        shuffle: bool,
        seed: int,
        shares: Sequence[Share] = (),
        limit: Limit | None = None,
        teacher: PrivilegedPrompts | None = None,
        seen: Seen | None = None,
    ) -> None:
        """Create a data set from examples. `shares` are the sources in `examples`, by default one. `limit` is for
        examples whose lengths weren't all checked before.

        `teacher` builds the teacher's prompts, if they differ from the model's. With `seen`, prompts in it and prompts
        that occur again count as repeats.
        """
        self._examples = examples
        self._tokenizer = tokenizer
        self._shuffle = shuffle
        self._seed = seed
        self._shares = shares or (Share(len(examples)),)
        self._limit = limit
        self._teacher = teacher
        self._length = sum(share.visits for share in self._shares)
        self._order: tuple[int, np.ndarray] | None = None
        self._last: tuple[int, Example] | None = None
        """Index and example of the last read prompt, so that publishing and the search for repeats read it only
        once."""
        self._media_changes: MediaChanges | None = None
        """Detector of changed media; None before `keep`, and if no prompt has media."""
        self._first_visits = None if seen is None else FirstVisits(len(examples), seen, self._example)

    def __len__(self) -> int:
        """Return the number of prompts that an epoch visits."""
        return self._length

    @property
    def prompts(self) -> int:
        """Number of different prompts in the data set."""
        return len(self._examples)

    @cached_property
    def digest(self) -> str:
        """Hash of all prompts with their answers, tools and other fields, and of their order and number.

        Raises DataError if a file can't be read any more.
        """
        try:
            return digest_of(self._examples)
        except OSError as error:
            raise DataError("data", f"can't be read: {error}") from error

    def prompt(self, index: int) -> Prompt:
        """Return the prompt at an index of the data set. Raises DataError if its row is wrong, which is possible in a
        large file whose rows weren't all checked."""
        example = self._example(index)
        media = self._media.take(index, example) if self._media is not None else []
        if media and self._media_changes is not None:
            self._media_changes.look(index, example, media)
        tokens = self._tokenizer.encode_seen(example, media) if media else self._tokenizer.encode([example])[0]
        messages = [] if isinstance(example.prompt, str) else with_references(example.prompt, media)
        (teachers,) = [None] if self._teacher is None else self._teacher.encode(self._tokenizer, [example])
        return Prompt(
            tokens=tokens,
            text=example.text,
            answer=example.answer,
            metadata=example.metadata,
            index=index,
            messages=messages,
            sampling=example.sampling,
            tools=example.tools,
            teacher_tokens=teachers,
            media=PromptMedia.of(media) if media else NO_MEDIA,
        )

    def look_ahead(self, cursor: Cursor, count: int) -> None:
        """Start preparing the media of the prompts at the next `count` positions, because they will probably be visited
        next."""
        if self._media is None:
            return
        epoch, position = cursor.place
        for index in self.order(epoch)[position : position + count].tolist():
            try:
                self._media.expect([(index, self._example(index))])
            except DataError:  # reported when its turn comes
                continue

    @cached_property
    def _media(self) -> MediaAhead | None:
        """Loader that prepares the media of prompts in advance; None if the run has no media."""
        return None if self._tokenizer.vision is None else MediaAhead(self._tokenizer.vision)

    def _example(self, index: int) -> Example:
        last = self._last  # read once: threads may share it
        if last is None or last[0] != index:
            try:
                last = self._last = (index, self._examples[index])
            except ValueError as error:
                raise DataError(self._limit.field if self._limit else "data", str(error)) from error
        return last[1]

    def index_at(self, cursor: Cursor) -> int:
        """Return the index of the prompt that a cursor points to."""
        epoch, position = cursor.place
        return int(self.order(epoch)[position])

    def fits(self, prompt: Prompt) -> bool:
        """Return True if a prompt fits the length limit. Raises DataError if it is too long and may not be left out."""
        if self._limit is None:
            return True
        fits = len(prompt.tokens) <= self._limit.tokens
        teachers = 0 if prompt.teacher_tokens is None else len(prompt.teacher_tokens)
        if fits and (self._teacher is None or teachers <= self._teacher.limit):
            return True
        if not self._limit.skip:
            place = f"prompt {prompt.index}"
            if fits and self._teacher is not None:
                raise self._teacher.too_long(place, teachers)
            raise self._limit.too_long(place, len(prompt.tokens))
        return False

    def keep(self, folder: Path) -> None:
        """Store known repeats and hashes of media in a run's folder, and load the stored ones.

        Call it before the first visit. Raises DataError if a file of the data can't be read any more.
        """
        if self._first_visits is not None:
            self._first_visits.keep(folder / COMPARED)
        if self._media is not None:
            self._media_changes = MediaChanges(len(self._examples), self.digest, folder / VISITED_MEDIA)

    def is_repeat(self, cursor: Cursor) -> bool:
        """Return True if the prompt that a cursor points to is left out as a repeat. Raises DataError if a prompt can't
        be read."""
        return self._first_visits is not None and self._first_visits.is_repeat(cursor.place, self.order)

    @property
    def repeats(self) -> Sequence[int]:
        """Indices of repeated prompts, in the order in which `is_repeat` found them. The list grows during the run."""
        return () if self._first_visits is None else self._first_visits.repeats

    def none_left(self) -> DataError:
        """Return the error for a data set without any usable prompt."""
        assert self._limit is not None
        if self._first_visits is None:
            return self._limit.all_too_long()
        return DataError(
            self._limit.field,
            f"every prompt is longer than data.max_prompt_tokens = {self._limit.tokens}, or in an evaluation set or "
            "there twice (data.deduplicate)",
        )

    def order(self, epoch: int) -> np.ndarray:
        """Return the indices of the prompts that an epoch visits, in the order of the visits, int32 [visits]."""
        if self._order is None or self._order[0] != epoch:
            visits = epoch_visits(self._shares, epoch, self._seed)
            if self._shuffle:
                np.random.default_rng((self._seed, epoch)).shuffle(visits)
            self._order = (epoch, visits)
        return self._order[1]

    def after(self, cursor: Cursor) -> Cursor:
        """Return the cursor that follows the prompt at `cursor`."""
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


@dataclass(frozen=True)
class RunData:
    """The loaded data of a run: training prompts, evaluation sets and the tokenizer."""

    train: PromptDataset
    """Data set of the training prompts."""
    evaluation: dict[str, PromptDataset]
    """Data sets of the evaluations, by the name of the set: held_out, if the source holds out prompts, and
    eval.sets."""
    skipped: int
    """Number of prompts, for training and evaluation, that are left out as too long."""
    tokenizer: PromptTokenizer
    """Tokenizer of the trained model."""
    repeated: int = 0
    """Number of training prompts left out as duplicates, or as part of an evaluation set. Those in large files are
    found later, and not counted here."""
    expert_bytes: int = 0
    """Bytes per token of the column routed_experts; 0 if the run doesn't store it."""


def load_data(config: RunConfig, *, first_look: bool = False) -> RunData:
    """Open, template, tokenise and check all prompts of a run. Of large files, only a part is checked.

    `first_look` finds most mistakes quickly, before another process loads the data: fewer prompts are checked, and
    checks that need all prompts are skipped. Raises DataError, which names the setting and the line.
    """
    if problem := config.media_problem:
        raise DataError(*problem)
    most = FIRST_LOOK if first_look else None
    folder = resolve_model(config.model.path, weights=False)
    tokenizer = PromptTokenizer.of_run(config, folder)
    sources, held_out = read_sources(config)
    sets = {HELD_OUT: held_out} | _named_sets(config)
    repeated, seen = 0, None
    if config.data.deduplicate and not first_look:
        seen = _of_sets(sets.values())
        if not _compares_later(config, sources):
            sources, repeated = _without_repeats(sources, seen)
            seen = None
    teacher = privileged_prompts(config)
    checked = [check_source(source, tokenizer, config, teacher, most) for source in sources]
    if not first_look:
        check_tools(zip(sources, checked, strict=True))
    weights = mixture_weights(config.data, [len(one.examples) for one in checked])
    for one in checked:
        check_teachers(config, (one.examples[place] for place in evenly_spread(len(one.examples), most or CHECKED)))
    evaluation, skipped = _evaluation_sets(config, tokenizer, sets)
    return RunData(
        train=PromptDataset(
            checked[0].examples if len(checked) == 1 else Joined([one.examples for one in checked]),
            tokenizer,
            shuffle=config.data.shuffle,
            seed=config.run.seed,
            shares=[Share(len(one.examples), weight) for one, weight in zip(checked, weights, strict=True)],
            limit=next((one.limit for one in checked if one.limit), None),
            teacher=teacher,
            seen=seen,
        ),
        evaluation=evaluation,
        skipped=skipped + sum(one.skipped for one in checked),
        repeated=repeated,
        tokenizer=tokenizer,
        expert_bytes=routed_expert_bytes(folder) if config.rollout.return_routed_experts else 0,
    )


def load_evaluation(config: RunConfig, names: Collection[str]) -> dict[str, PromptDataset]:
    """Open and check only the prompts of the named evaluation sets. Raises DataError, which names the setting and the
    line."""
    tokenizer = PromptTokenizer.of_run(config, resolve_model(config.model.path, weights=False))
    held_out = {HELD_OUT: read_sources(config)[1]} if HELD_OUT in names else {}
    return _evaluation_sets(config, tokenizer, held_out | _named_sets(config, names))[0]


def _of_sets(sets: Iterable[Source]) -> Seen:
    """Return the set of hashes of the evaluation sets' prompts."""
    seen = Seen()
    for one in sets:
        seen.fresh(keys_of(one.examples).normalised)
    return seen


def _compares_later(config: RunConfig, sources: Sequence[Source]) -> bool:
    """Return True if repeats are found only when prompts are visited, because not all rows of a large file are read at
    the start.

    With a user's own sampler this is impossible, because its order isn't known beforehand.
    """
    return not config.data.curriculum.is_own and any(len(source.examples) > CHECKED for source in sources)


def _without_repeats(sources: Sequence[Source], seen: Seen) -> tuple[list[Source], int]:
    """Remove prompts that an earlier source has or that were already seen. Returns the remaining sources and the number
    of removed prompts."""
    left, repeated = [], 0
    for source in sources:
        places = np.flatnonzero(seen.fresh(keys_of(source.examples).normalised))
        if not len(places):
            raise DataError(
                source.field, "every prompt is in an evaluation set or an earlier source (data.deduplicate)"
            )
        repeated += len(source.examples) - len(places)
        left.append(replace(source, examples=Chosen(source.examples, places)))
    return left, repeated


def _named_sets(config: RunConfig, names: Collection[str] | None = None) -> dict[str, Source]:
    return {
        one.name: read_set(config, number)
        for number, one in enumerate(config.eval.sets)
        if names is None or one.name in names
    }


def _evaluation_sets(
    config: RunConfig, tokenizer: PromptTokenizer, sources: Mapping[str, Source]
) -> tuple[dict[str, PromptDataset], int]:
    """Check the prompts of evaluation sets. Returns the data sets, without empty ones, and the number of prompts left
    out."""
    checked = {name: check_source(source, tokenizer, config) for name, source in sources.items()}
    own = [name for name, source in sources.items() if source.tools.setting != "data.tools_key"]
    check_tools((sources[name], checked[name]) for name in own)
    sets = {
        name: PromptDataset(one.examples, tokenizer, shuffle=False, seed=0, limit=one.limit)
        for name, one in checked.items()
        if one.examples
    }
    return sets, sum(one.skipped for one in checked.values())
