"""`relaxd data`: checks and shows a run's prompts, from a configuration or from a file or folder with prompts."""

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from relaxd.cli.options import WordsArgument, data_errors, new_console, split_words
from relaxd.cli.preparing.first_steps import prepare_model
from relaxd.client import CliError
from relaxd.config import RunConfig
from relaxd.config.load_toml import ConfigError, Problem, load, load_file
from relaxd.data.duplicates import Keys, Repeats, keys_of, overlap, repeats
from relaxd.data.examples import Example
from relaxd.data.prompt_checks import evenly_spread, read_some
from relaxd.data.prompt_files import LINES, TABLES, without_part
from relaxd.data.rows import kind_of
from relaxd.data.sources.evaluation_sets import read_set
from relaxd.data.sources.run_sources import Share, Source, mixture_weights, read_sources
from relaxd.data.tokenizer import PromptTokenizer
from relaxd.data.vision import normalise
from relaxd.models.folders import resolve_model
from relaxd.run_folder import HELD_OUT
from relaxd.telemetry.logs import escape

MOST_KEYS = 40
"""Maximum number of metadata keys of prompts to list."""
CONFIGURATIONS = (".toml", "")
"""File name endings of configurations; "" is for names without an ending, such as pipes."""


def load_words_or_prompts(words: list[str], further: Callable[[Path], str]) -> RunConfig:
    """Load the configuration that the words name, or make one for a file or folder with prompts.

    Args:
        words: see `WordsArgument`.
        further: returns the other settings that the command needs, as TOML, given the path with prompts.

    Raises:
        CliError: the words name no file, several files, or a file that is neither a configuration nor prompts.
        ConfigError: the configuration is wrong, or no option names the model for the prompts.
    """
    path, overrides = split_words(words)
    ending = path.suffix.partition("@")[0]
    if not without_part(path).is_dir():
        if ending in CONFIGURATIONS:
            return load_file(path, overrides)
        if ending not in (*LINES, *TABLES):
            raise CliError(
                f"{path} is neither a configuration (.toml) nor a file with prompts ({', '.join((*LINES, *TABLES))})"
            )
    if not any(word.startswith("--model.path") for word in overrides):
        what = f"is missing: {path} has prompts and no configuration, so name the model that gets them"
        raise ConfigError([Problem("model.path", f"{what}: --model.path FOLDER_OR_NAME")])
    lines = ("run.steps = 1", 'data.source = "files"', f"data.path = {json.dumps(str(path))}", further(path))
    return load("\n".join(lines), overrides, name=str(path))


def set_of(path: Path) -> str:
    """Return TOML that defines an evaluation set with all prompts of a file, named after the file."""
    name = re.sub(r"[^a-z0-9_.-]+", "-", path.stem.lower()).lstrip("_.-")[:64]
    name = "prompts" if name in ("", HELD_OUT) else name
    return f"[[eval.sets]]\nname = {json.dumps(name)}\npath = {json.dumps(str(path))}"


MOST_READ = 2000
"""Maximum number of prompts to read from a source, evenly spread."""
MOST_READ_WITH_MEDIA = 200
"""Maximum number of prompts to read with data.media_keys: they are held in memory, and their files are opened."""

MOST_COMPARED_WITH_MEDIA = 20_000
"""Maximum number of prompts with media to compare for repeats, because that reads all of their files."""


def data(
    words: WordsArgument, prompts: Annotated[int, typer.Option(min=0, help="Prompts of each source to show.")] = 2
) -> None:
    """Show what a run will see of its data: counts, lengths, metadata, and prompts as the model gets them.

    Instead of a configuration, FILE may be a file or folder with prompts: then --model.path names the model.
    """
    config = load_words_or_prompts(words, lambda path: 'reward.name = "dummy"')
    console = new_console()
    prepare_model(config, lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True))
    with data_errors():
        folder = resolve_model(config.model.path, weights=False)
        tokenizer = PromptTokenizer.of_run(config, folder)
        sources, held_out = read_sources(config)
        sets = [held_out, *(read_set(config, number) for number in range(len(config.eval.sets)))]
        of_sets = [(one.shown, keys_of(one.examples)) for one in sets if len(one.examples)]
        weights = mixture_weights(config.data, [len(source.examples) for source in sources])
        for source, weight in zip(sources, weights, strict=True):
            _show(source, tokenizer, config, prompts, console, evaluation=of_sets, weight=weight)
        for one in sets:
            if len(one.examples):
                _show(one, tokenizer, config, 0, console)


def _show(
    source: Source,
    tokenizer: PromptTokenizer,
    config: RunConfig,
    prompts: int,
    console: Console,
    *,
    evaluation: Sequence[tuple[str, Keys]] = (),
    weight: float = 1.0,
) -> None:
    """Print what a data source contains, and how many of its prompts are repeated or also in an evaluation set."""
    most = MOST_READ_WITH_MEDIA if config.data.media_keys else MOST_READ
    places = evenly_spread(len(source.examples), most)
    examples = read_some(source, places)
    seen = [example for example in examples if example.media]
    lengths = np.array([len(tokens) for tokens in tokenizer.encode(examples)])
    limit = config.data.max_prompt_tokens
    too_long = int((lengths > limit).sum())
    read = "" if len(places) == len(source.examples) else f" of the {len(places)} that were read"
    table = Table(show_header=False, box=None, pad_edge=False, title=source.shown, title_justify="left")
    table.add_row("prompts", f"{len(source.examples):,}")
    if weight != 1:
        table.add_row("in an epoch", f"{Share(len(source.examples), weight).visits:,}")
    quantiles = zip(("shortest", "median", "95 %", "longest"), np.quantile(lengths, (0, 0.5, 0.95, 1)), strict=True)
    table.add_row("tokens", ", ".join(f"{name} {round(value)}" for name, value in quantiles))
    what = "left out" if config.data.overlong == "skip" else 'an error: see data.overlong = "skip"'
    table.add_row(f"above {limit}", f"{too_long}{read}{f' ({what})' if too_long else ''}")
    table.add_row("no answer", f"{sum(not example.answer for example in examples)}{read}")
    if source.tools.key:
        table.add_row("with tools", f"{sum(bool(example.tools) for example in examples)}{read}")
    if seen:
        items = Counter(item.kind for example in seen for item in example.media)
        counted = ", ".join(f"{count} {kind}s" for kind, count in items.items())
        table.add_row("with media", f"{len(seen)}{read}, {counted}")
    if seen and len(source.examples) > MOST_COMPARED_WITH_MEDIA:
        table.add_row("repeated", f"not counted of more than {MOST_COMPARED_WITH_MEDIA:,} prompts with media")
    else:
        keys = keys_of(source.examples)
        table.add_row("repeated", _repeated(repeats(keys)))
        for name, others in evaluation:
            table.add_row(f"in {name}", f"{overlap(keys, others):,}")
    kinds = _kinds(examples)
    for name in islice(kinds, MOST_KEYS):
        table.add_row(escape(f"metadata.{name}"), Text(kinds[name]))
    if len(kinds) > MOST_KEYS:
        table.add_row("metadata", f"and {len(kinds) - MOST_KEYS:,} more keys")
    console.print(table)
    for example in examples[:prompts]:
        console.print(Text(f"\n{example.place}, answer {example.answer!r}:", style="bold"))
        console.print(Text(tokenizer.render(example)), soft_wrap=True)
        if example.media:
            _show_media(example, tokenizer, console)
    console.print()


def _show_media(example: Example, tokenizer: PromptTokenizer, console: Console) -> None:
    """Decode a prompt's media and print their original and normalised sizes and their tokens."""
    assert tokenizer.vision is not None  # or the prompt would have been refused
    media = normalise(example, tokenizer.vision)
    table = Table(box=None, pad_edge=False)
    for name in ("item", "original", "normal", "time", "tokens", "sha256"):
        table.add_column(name)
    for item, found in zip(example.media, media, strict=True):
        table.add_row(escape(item.place), *found.size.shown, str(found.size.tokens), found.sha256[:12])
    console.print(table)
    console.print(f"{len(tokenizer.encode_seen(example, media))} tokens with media", highlight=False)


def _repeated(found: Repeats) -> str:
    answers = f", {found.other_answers:,} of them with another answer" if found.other_answers else ""
    return f"{found.exact:,} unchanged, {found.normalised:,} with other case or white space{answers}"


def _kinds(examples: list[Example]) -> dict[str, str]:
    """Return by metadata key the kinds of its values, such as text or number, with counts if there are several."""
    found: dict[str, Counter[str]] = {}
    for example in examples:
        for name, value in example.metadata.items():
            found.setdefault(name, Counter())[kind_of(value)] += 1
    for kinds in found.values():
        if missing := len(examples) - kinds.total():
            kinds["missing"] = missing
    return {
        name: ", ".join(kind if len(kinds) == 1 else f"{count} {kind}" for kind, count in kinds.most_common())
        for name, kinds in found.items()
    }
