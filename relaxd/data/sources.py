"""The sources of a run's prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

from relaxd.config import RunConfig
from relaxd.data.addition import addition
from relaxd.data.columns import Columns, Examples
from relaxd.data.examples import Example
from relaxd.data.files.opening import open_rows
from relaxd.data.reasoning_gym import reasoning_gym

SETTINGS = {
    "addition": ("data", "data"),
    "reasoning_gym": ("data.reasoning_gym", "data.reasoning_gym"),
    "files": ("data.path", "data.eval_path"),
    "jsonl": ("data.path", "data.eval_path"),
}
"""The settings that training and held-out prompts of each source come from."""


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


def read_sources(config: RunConfig) -> tuple[list[Source], Source]:
    """Open the sources of a run's training prompts, and that of the held-out ones, without the model.

    Raises DataError, which names the setting and the file.
    """
    data = config.data
    field, held_out_field = SETTINGS[data.source]
    if not data.has_files:
        train, held_out = addition(data.digits) if data.source == "addition" else reasoning_gym(data.reasoning_gym)
        return [Source(train, field, shown=data.source)], Source(held_out, held_out_field, shown="held out")
    columns = Columns(data.prompt_key, data.answer_key, data.metadata_key, data.system_prompt)
    sources = []
    for number, one in enumerate(data.sources):
        own = Columns(
            one.prompt_key or columns.prompt,
            one.answer_key or columns.answer,
            one.metadata_key or columns.metadata,
            data.system_prompt,
            one.name,
            one.sampling,
        )
        place = f"data.sources.{number}.path"
        sources.append(Source(Examples(open_rows(one.path, place), own), place, one.weight, one.name or str(one.path)))
    if data.path is not None:
        sources.append(Source(Examples(open_rows(data.path, field), columns), field, shown=str(data.path)))
    held_out_rows: Sequence[Example] = ()
    if data.eval_path is not None:
        held_out_rows = Examples(open_rows(data.eval_path, held_out_field), columns)
    return sources, Source(held_out_rows, held_out_field, shown=f"{data.eval_path} (held out)")
