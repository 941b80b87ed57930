"""Checks of prompts before a run."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from relaxd.config import RunConfig
from relaxd.data.errors import DataError
from relaxd.data.examples import Example
from relaxd.data.privileged import PrivilegedPrompts
from relaxd.data.sources.columns import Examples
from relaxd.data.sources.sources import Source, ToolsColumn
from relaxd.data.tokenizer import PromptTokenizer

CHECK_BATCH = 1024
CHECKED = 20_000
"""Maximum number of prompts of a source that are checked before a run; the others are when their turn comes."""
FIRST_LOOK = 1000
"""Prompts of a source that `relaxd run` looks at before it starts services, whose coordinator checks CHECKED."""
MAX_PROBLEMS_SHOWN = 5


@dataclass(frozen=True)
class Limit:
    """Treatment of long prompts that weren't looked at before the run."""

    tokens: int
    """data.max_prompt_tokens."""
    skip: bool
    """True if longer prompts are left out (data.overlong = "skip"); False if they are errors."""
    field: str
    """The setting that the prompts come from, for errors."""

    def too_long(self, place: str, tokens: int) -> DataError:
        """Return the error of a prompt that is too long."""
        return DataError(
            self.field,
            f"{place} has {tokens} tokens, more than data.max_prompt_tokens = {self.tokens}: raise it, or set "
            'data.overlong = "skip"',
        )

    def all_too_long(self) -> DataError:
        """Return the error of prompts that are all too long."""
        return DataError(self.field, f"every prompt is longer than data.max_prompt_tokens = {self.tokens}")


@dataclass(frozen=True)
class Checked:
    """Prompts of a source that may be published."""

    examples: Sequence[Example]
    skipped: int
    """Prompts that were left out because they are too long."""
    limit: Limit | None
    """Set if only some of them were looked at."""
    has_tools: bool = False
    """True if any prompt that was looked at has tools."""


def check_source(
    source: Source,
    tokenizer: PromptTokenizer,
    config: RunConfig,
    teacher: PrivilegedPrompts | None = None,
    most: int | None = None,
) -> Checked:
    """Check the prompts of a source: all of them, or of more than CHECKED some that are evenly spread.

    Args:
        source: the source.
        tokenizer: the model's tokenizer.
        config: the run.
        teacher: what makes the teacher's prompts, if it has prompts of its own.
        most: a limit below CHECKED, with which prompts that are all too long are no error yet.

    Raises DataError: rows are wrong, or prompts are longer than data.max_prompt_tokens and data.overlong forbids it.
    """
    count = len(source.examples)
    limit = Limit(config.data.max_prompt_tokens, config.data.overlong == "skip", source.field)
    places = evenly_spread(count, most or CHECKED)
    examples = read_some(source, places)
    kept = []
    for start in range(0, len(examples), CHECK_BATCH):
        batch = examples[start : start + CHECK_BATCH]
        longer = tokenizer.longer(batch, limit.tokens)
        for index, example in enumerate(batch):
            if tokens := longer.get(index):
                if not limit.skip:
                    raise limit.too_long(example.place, tokens)
            elif teacher is not None and (teachers := tokenizer.longer([teacher.example(example)], teacher.limit)):
                if not limit.skip:
                    raise teacher.too_long(example.place, teachers[0])
            else:
                kept.append(example)
    if examples and not kept and (most is None or len(places) == count):
        raise limit.all_too_long()
    has_tools = any(example.tools for example in examples)
    if len(places) < count:
        return Checked(source.examples, 0, limit, has_tools)
    return Checked(kept, count - len(kept), None, has_tools)


def check_tools(checked: Iterable[tuple[Source, Checked]]) -> None:
    """Check that each setting of a column with tools finds some in a source. Raises DataError."""
    sources: dict[ToolsColumn, list[Source]] = {}
    found: set[ToolsColumn] = set()
    for source, one in checked:
        sources.setdefault(source.tools, []).append(source)
        if one.has_tools:
            found.add(source.tools)
    for tools, those in sources.items():
        if tools.key and tools not in found:
            names = [one.examples.nearest(tools.key) for one in those if isinstance(one.examples, Examples)]
            hint = next((f'; did you mean "{name}"?' for name in names if name not in (None, tools.key)), "")
            raise DataError(
                tools.setting, f'= "{tools.key}": no prompt that was looked at has tools in such a column{hint}'
            )


def evenly_spread(count: int, most: int) -> range:
    """Return at most `most` of `count` places, evenly spread."""
    return range(0, count, max(1, -(-count // most)))


def read_some(source: Source, places: range) -> list[Example]:
    """Read some prompts. Raises DataError with the first rows that are wrong."""
    examples, problems = [], []
    for place in places:
        try:
            examples.append(source.examples[place])
        except ValueError as error:
            problems.append(str(error))
    if problems:
        shown = "; ".join(problems[:MAX_PROBLEMS_SHOWN])
        more = f"; and {len(problems) - MAX_PROBLEMS_SHOWN} more" if len(problems) > MAX_PROBLEMS_SHOWN else ""
        raise DataError(source.field, f"{len(problems)} of {len(places)} rows are wrong: {shown}{more}")
    return examples
