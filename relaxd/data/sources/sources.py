"""The sources of a run's prompts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from relaxd.config import DataConfig, RunConfig
from relaxd.config.evaluation import EvalSet
from relaxd.config.prompts.data import DataSource
from relaxd.data.errors import DataError
from relaxd.data.examples import Example
from relaxd.data.files.opening import open_rows
from relaxd.data.files.rows import Rows
from relaxd.data.sources.addition import addition
from relaxd.data.sources.columns import Columns, Examples
from relaxd.data.sources.own_code import open_own, prompt_function
from relaxd.data.sources.reasoning_gym import reasoning_gym
from relaxd.data.tools_file import ToolsFileError, schemas_of

SETTINGS = {
    "addition": ("data", "data"),
    "reasoning_gym": ("data.reasoning_gym", "data.reasoning_gym"),
    "files": ("data.path", "data.eval_path"),
    "jsonl": ("data.path", "data.eval_path"),
}
"""The settings that training and held-out prompts of each source come from."""
GENERATED = ("addition", "reasoning_gym")
"""Sources whose prompts are made by relaxd."""


@dataclass(frozen=True)
class Source:
    """Prompts of one source, before they are checked."""

    examples: Sequence[Example]
    """The prompts; those of files are read when they are asked for, and then raise ValueError for a wrong row."""
    field: str
    """The setting that they come from."""
    weight: float = 1.0
    """How often an epoch visits them."""
    shown: str = ""
    """The source's name or path, for people."""


def columns_of(data: DataConfig, own: DataSource | EvalSet | None = None) -> Columns:
    """Return the columns of the data, or of one of its sources or evaluation sets. Raises DataError."""
    common = Columns(
        prompt=data.prompt_key,
        answer=data.answer_key,
        metadata=data.metadata_key,
        system_prompt=data.system_prompt,
        tools=data.tools_key,
        other_tools=tools_of(data),
        make_prompt=prompt_function(data),
    )
    if own is None:
        return common
    chosen = replace(
        common,
        prompt=own.prompt_key or common.prompt,
        answer=own.answer_key or common.answer,
        metadata=own.metadata_key or common.metadata,
    )
    return replace(chosen, source=own.name, sampling=own.sampling) if isinstance(own, DataSource) else chosen


def tools_of(data: DataConfig) -> list[dict[str, Any]]:
    """Return the schemas of data.tools_file. Raises DataError."""
    try:
        return schemas_of(data.tools_file) if data.tools_file is not None else []
    except ToolsFileError as error:
        raise DataError("data.tools_file", str(error)) from error


def read_sources(config: RunConfig) -> tuple[list[Source], Source]:
    """Open the sources of a run's training prompts, and that of the held-out ones, without the model.

    Raises DataError, which names the setting and the file.
    """
    data = config.data
    field, held_out_field = SETTINGS.get(data.source, ("data.source", "data.eval_path"))
    if data.source in GENERATED:
        train, held_out = addition(data.digits) if data.source == "addition" else reasoning_gym(data.reasoning_gym)
        if tools := tools_of(data):
            train, held_out = ([replace(one, tools=tools) for one in some] for some in (train, held_out))
        return [Source(train, field, shown=data.source)], Source(held_out, held_out_field, shown="held out")
    sources = []
    held_out_rows: Rows | None = None
    columns = columns_of(data)
    if data.is_own:
        rows, held_out_rows = open_own(data)
        sources.append(Source(Examples(rows, columns), field, shown=data.source))
    for number, one in enumerate(data.sources):
        place = f"data.sources.{number}.path"
        examples = Examples(open_rows(one.path, place), columns_of(data, one))
        sources.append(Source(examples, place, one.weight, one.name or str(one.path)))
    if data.path is not None:
        sources.append(Source(Examples(open_rows(data.path, field), columns), field, shown=str(data.path)))
    shown = f"{data.source} (held out)"
    if data.eval_path is not None:
        held_out_rows, shown = open_rows(data.eval_path, "data.eval_path"), f"{data.eval_path} (held out)"
    held_out_examples = () if held_out_rows is None else Examples(held_out_rows, columns)
    return sources, Source(held_out_examples, held_out_field, shown=shown)
