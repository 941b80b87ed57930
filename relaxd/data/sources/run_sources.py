"""The sources of a run's prompts, including users' own sources, and how often an epoch visits each source."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from relaxd.config import DataConfig, RunConfig
from relaxd.config.data import DataSource
from relaxd.config.evaluation import EvalSet
from relaxd.data.examples import Example
from relaxd.data.prompt_files import open_rows
from relaxd.data.rows import Rows, plain
from relaxd.data.sources.addition_source import addition
from relaxd.data.sources.prompt_columns import Columns, Examples
from relaxd.data.sources.reasoning_gym_source import reasoning_gym
from relaxd.data.tools_file import ToolsFileError, schemas_of
from relaxd.importing import ImportProblem, describe_error, import_own
from relaxd.models import DataError

DIGESTED = 20_000
"""Maximum number of rows of a user's own source, evenly spread, that are read for the digest that shows changed
data."""


class OwnSource(Protocol):
    """Interface of a user's own source of prompts, which is created with data.settings. An optional `held_out()`
    returns another source with the held-out prompts."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the row at an index: an object such as {"prompt": ..., "answer": ...}, always the same for the same
        index."""


class OwnRows:
    """Rows of a user's own source of prompts."""

    def __init__(self, source: OwnSource, name: str) -> None:
        """Wrap the source. Raises DataError if it has no length."""
        try:
            self._length = len(source)
        except Exception as error:  # a user's class may raise anything
            raise DataError("data.source", f'= "{name}" has no length: {describe_error(error)}') from error
        self._source = source
        self._name = name

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        try:
            row = self._source[index]
        except Exception as error:  # a user's class may raise anything
            raise ValueError(f"it failed: {describe_error(error)}") from error
        if not isinstance(row, dict):
            raise ValueError(f'a row must be a dict such as {{"prompt": "..."}}, not a {type(row).__name__}')
        return row

    def scan(self) -> Iterator[dict[str, Any] | None]:
        for index in range(self._length):
            try:
                yield self[index]
            except ValueError:
                yield None

    def content(self, part: range) -> Iterator[bytes]:
        for index in part[:: max(1, -(-len(part) // DIGESTED))]:
            try:
                yield json.dumps(plain(self[index]), default=_text).encode()
            except ValueError:
                yield b"wrong"

    def place(self, index: int) -> str:
        return f"{self._name} row {index}"


def _text(value: Any) -> str:
    """Return a text for a value that JSON can't represent: bytes as hex, other objects by their type's name.

    The digest needs the same text in each process; an object's repr may contain its address.
    """
    return value.hex() if isinstance(value, bytes) else type(value).__name__


def open_own(data: DataConfig) -> tuple[Rows, Rows | None]:
    """Create a user's own source. Returns its rows, and the rows of its held-out prompts; None without `held_out()`.

    Raises DataError if the class can't be imported or created, has no rows, or its `held_out()` fails.
    """
    kind = _import(data.source, "data.source")
    try:
        source = kind(**data.settings)
    except Exception as error:  # a user's class may raise anything
        raise DataError("data.source", f'= "{data.source}" can\'t be made: {describe_error(error)}') from error
    rows = OwnRows(source, data.source)
    if not len(rows):
        raise DataError("data.source", f'= "{data.source}" has no rows')
    if not hasattr(source, "held_out"):
        return rows, None
    try:
        held_out = source.held_out()
    except Exception as error:  # a user's class may raise anything
        raise DataError("data.source", f'= "{data.source}": held_out() failed: {describe_error(error)}') from error
    return rows, OwnRows(held_out, f"{data.source}, held out,")


def prompt_function(name: str, setting: str) -> Callable[[dict[str, Any]], Any] | None:
    """Import the user's function that builds prompts from rows. Returns None if `name` is empty. Raises DataError if
    the function can't be imported or called."""
    if not name:
        return None
    function: Callable[[dict[str, Any]], Any] = _import(name, setting)
    return function


def _import(name: str, setting: str) -> Callable[..., Any]:
    try:
        found = import_own(name)
    except ImportProblem as error:
        raise DataError(setting, f'= "{name}": {error}') from error
    if not callable(found):
        raise DataError(setting, f'= "{name}" is a {type(found).__name__}, which can\'t be called')
    called: Callable[..., Any] = found
    return called


SETTINGS = {
    "addition": ("data", "data"),
    "reasoning_gym": ("data.reasoning_gym", "data.reasoning_gym"),
    "files": ("data.path", "data.eval_path"),
    "jsonl": ("data.path", "data.eval_path"),
}
"""Names of the settings that give the training prompts and the held-out prompts, by bundled source."""
GENERATED = ("addition", "reasoning_gym")
"""Names of the sources whose prompts relaxd generates."""


@dataclass(frozen=True)
class ToolsColumn:
    """Column of a source that holds the tools for the chat template."""

    key: str = ""
    """Name of the column; empty if there is none."""
    setting: str = "data.tools_key"
    """Name of the setting that names the column."""


@dataclass(frozen=True)
class Source:
    """Prompts of a source before they are checked."""

    examples: Sequence[Example]
    """Examples of the source. Examples from files are read on demand, and a wrong row raises ValueError."""
    field: str
    """Name of the setting that gives the prompts."""
    shown: str = ""
    """Name or path of the source, for messages."""
    tools: ToolsColumn = ToolsColumn()
    """Column that holds the prompts' tools."""


def columns_of(data: DataConfig, own: DataSource | EvalSet | None = None, place: str = "data") -> Columns:
    """Return the columns of a run's data. With `own`, return those of this source or evaluation set, whose place in the
    configuration is `place`.

    The settings of `own` win; its prompt_key also wins over data.prompt_function. Raises DataError if the prompt
    function or the tools file can't be used.
    """
    common = Columns(
        prompt=data.prompt_key,
        answer=data.answer_key,
        metadata=data.metadata_key,
        system_prompt=data.system_prompt,
        tools=data.tools_key,
        other_tools=schemas_of_tools(data),
        media=data.media_keys,
        original=data.original_key,
    )
    function, setting = data.prompt_function, "data.prompt_function"
    if own is not None:
        common = replace(
            common,
            prompt=own.prompt_key or common.prompt,
            answer=own.answer_key or common.answer,
            metadata=own.metadata_key or common.metadata,
            system_prompt=common.system_prompt if own.system_prompt is None else own.system_prompt,
            tools=common.tools if own.tools_key is None else own.tools_key,
        )
        if own.prompt_function is not None:
            function, setting = own.prompt_function, f"{place}.prompt_function"
        elif own.prompt_key:
            function = ""
    if isinstance(own, DataSource):
        common = replace(common, source=own.name, sampling=own.sampling)
    return replace(common, make_prompt=prompt_function(function, setting), made_by=setting)


def tools_of(data: DataConfig, own: DataSource | EvalSet | None = None, place: str = "data") -> ToolsColumn:
    """Return the column with tools of a run's data. With `own`, return that of this source or evaluation set."""
    if own is None or own.tools_key is None:
        return ToolsColumn(data.tools_key, "data.tools_key")
    return ToolsColumn(own.tools_key, f"{place}.tools_key")


def schemas_of_tools(data: DataConfig) -> list[dict[str, Any]]:
    """Return the schemas of the tools in data.tools_file; [] without this file. Raises DataError if it can't be
    used."""
    try:
        return schemas_of(data.tools_file) if data.tools_file is not None else []
    except ToolsFileError as error:
        raise DataError("data.tools_file", str(error)) from error


def read_sources(config: RunConfig) -> tuple[list[Source], Source]:
    """Open the sources of a run's training prompts, and the source of the held-out prompts, without the model.

    Raises DataError, which names the setting and the file.
    """
    data = config.data
    field, held_out_field = SETTINGS.get(data.source, ("data.source", "data.eval_path"))
    if data.source in GENERATED:
        made = addition(data.digits) if data.source == "addition" else reasoning_gym(data.reasoning_gym)
        schemas = schemas_of_tools(data)
        train, held_out = (
            [replace(one, tools=schemas).with_system_prompt(data.system_prompt) for one in examples]
            for examples in made
        )
        return [Source(train, field, shown=data.source)], Source(held_out, held_out_field, shown="held out")
    sources = []
    held_out_rows: Rows | None = None
    columns, tools = columns_of(data), tools_of(data)
    if data.is_own:
        rows, held_out_rows = open_own(data)
        sources.append(Source(Examples(rows, columns), field, data.source, tools))
    for number, one in enumerate(data.sources):
        place = f"data.sources.{number}"
        examples = Examples(open_rows(one.path, f"{place}.path"), columns_of(data, one, place))
        sources.append(Source(examples, f"{place}.path", one.name or str(one.path), tools_of(data, one, place)))
    if data.path is not None:
        sources.append(Source(Examples(open_rows(data.path, field), columns), field, str(data.path), tools))
    shown = f"{data.source} (held out)"
    if data.eval_path is not None:
        held_out_rows, shown = open_rows(data.eval_path, "data.eval_path"), f"{data.eval_path} (held out)"
    held_out_examples = () if held_out_rows is None else Examples(held_out_rows, columns)
    return sources, Source(held_out_examples, held_out_field, shown=shown)


@dataclass(frozen=True)
class Share:
    """Share of a source in a mixture of sources."""

    count: int
    """Number of prompts of the source."""
    weight: float = 1.0
    """Number of visits to each prompt of the source in an epoch."""

    @property
    def visits(self) -> int:
        """Number of an epoch's visits that go to the source, at least one."""
        return max(1, round(self.count * self.weight))


def mixture_weights(data: DataConfig, counts: Sequence[int]) -> list[float]:
    """Return the weight of each source: how often an epoch visits each of its prompts. `counts` are the sources'
    numbers of prompts.

    With data.temperature T, a source of n prompts gets N * n**(1/T) / S of the N visits of an epoch, where N is the
    number of all prompts and S the sum of n**(1/T) over the sources (Arivazhagan et al. 2019, arXiv 1907.05019).
    """
    if data.temperature is None:
        return [one.weight for one in data.sources] or [1.0] * len(counts)
    sizes = np.array(counts, np.float64)
    powers = (sizes / sizes.max()) ** (1 / data.temperature)  # powers of counts could overflow
    return list((sizes.sum() * powers / powers.sum() / sizes).tolist())


def epoch_visits(shares: Sequence[Share], epoch: int, seed: int) -> np.ndarray:
    """Return the indices of the prompts that an epoch visits, source by source, int32 [visits]; int64 if there are 2^31
    prompts or more.

    A source is visited in rounds through all its prompts. Rounds continue from epoch to epoch, so a weight of 0.5
    reaches every prompt within two epochs. The order of a source's rounds depends only on the seed.
    """
    kind = np.int32 if sum(share.count for share in shares) < 2**31 else np.int64
    parts, first = [], 0
    for number, share in enumerate(shares):
        if share.visits == share.count:
            parts.append(np.arange(first, first + share.count, dtype=kind))
        else:
            start = epoch * share.visits
            visits = np.arange(start, start + share.visits, dtype=np.int64) % share.count
            if share.visits % share.count:
                visits = np.random.default_rng((seed, number)).permutation(share.count)[visits]
            parts.append((first + visits).astype(kind))
        first += share.count
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
