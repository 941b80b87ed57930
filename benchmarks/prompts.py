"""Start of a run on a million prompts in a Parquet file: `python -m benchmarks.prompts --model MODEL`.

A process of its own imports, opens the file, checks evenly spread prompts, and gives the first 200. Beside it, in the
same rounds: the same with every checked prompt tokenised, and the tokenizer alone on as many prompts.

With `--deduplicate`: a run's data beside the same with data.deduplicate and an evaluation set of 10,000 prompts; of the
training prompts 1 % are there twice. Also the peak of memory, and what a coordinator needs that goes on after 20,000
prompts.

With `--streaming`: what a prompt costs that is read from a file when its turn comes, in shuffled order, beside one that
is in memory; the row alone, the whole prompt with chat template and tokens, and the comparison with earlier prompts
(data.deduplicate), which reads the row as well.
"""

import argparse
import importlib.metadata
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.reporting import machine, report

WORDS = "What is the sum of all the numbers that are in this long list of numbers, whose number is "
WAYS = ("a run's data", "every checked prompt tokenised", "the tokenizer alone")
FIRST = 200
DEDUPLICATED = ("a run's data", "deduplicated", "deduplicated, resumed")
RESUMED = 20_000
"""Prompts that were given before a start that resumes."""
STREAMED = ("in memory", "Parquet", "JSON lines", "JSON array")
GIVEN = 20_000
"""Prompts that each round of --streaming takes."""


def write_prompts(path: Path, count: int, repeats: int) -> None:
    """Write prompts of `repeats` times two sentences."""
    import pyarrow as pa
    import pyarrow.parquet

    numbers = [number - 50 if number % 100 == 99 else number for number in range(count)]
    prompts = [f"{WORDS}{number}? {WORDS}" * repeats for number in numbers]
    pyarrow.parquet.write_table(pa.table({"prompt": prompts, "answer": pa.array(range(count))}), path)


def run_part(way: str, model: str, path: Path, *options: str) -> list[float]:
    """Measure one way in a process of its own, and return the numbers that it prints."""
    command = [sys.executable, "-m", "benchmarks.prompts", *options]
    command += ["--model", model, "--part", way, "--path", str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [float(number) for number in done.stdout.split()]


def measure(way: str, model: str, path: str) -> None:
    """Print the seconds of the processor and on the clock of one way."""
    begun, processor = time.perf_counter(), time.process_time()
    from relaxd.config import RunConfig
    from relaxd.data.dataset import Cursor, load_data
    from relaxd.data.prompt_checks import CHECK_BATCH, CHECKED
    from relaxd.data.tokenizer import PromptTokenizer

    data = {"source": "files", "path": path}
    config = RunConfig.model_validate(
        {"run": {"steps": 1}, "model": {"path": model}, "reward": {"name": "math"}, "data": data}
    )
    if way == WAYS[1]:

        def may_exceed(self: PromptTokenizer, text: str, limit: int) -> bool:
            return True

        PromptTokenizer._may_exceed = may_exceed  # type: ignore[method-assign]
    train = load_data(config).train
    cursor = Cursor()
    for _ in range(FIRST):
        train.prompt(train.index_at(cursor))
        cursor = train.after(cursor)
    if way == WAYS[2]:
        texts = [train._tokenizer.render(train._examples[index]) for index in range(CHECKED)]
        begun, processor = time.perf_counter(), time.process_time()
        for start in range(0, CHECKED, CHECK_BATCH):
            train._tokenizer._tokenizer.encode_batch_fast(texts[start : start + CHECK_BATCH], add_special_tokens=False)
    print(time.process_time() - processor, time.perf_counter() - begun)


def measure_deduplicated(way: str, model: str, path: str) -> None:
    """Print the seconds of the processor and on the clock, and the peak of memory in MB, of one way."""
    begun, processor = time.perf_counter(), time.process_time()
    from relaxd.config import RunConfig
    from relaxd.data.curriculum.run_curriculum import Curriculum
    from relaxd.data.dataset import Cursor, load_data

    config = RunConfig.model_validate(
        {
            "run": {"steps": 1},
            "model": {"path": model},
            "reward": {"name": "math"},
            "data": {"source": "files", "path": path, "deduplicate": way != DEDUPLICATED[0]},
            "eval": {"sets": [{"name": "set", "path": str(Path(path).with_name("set.parquet"))}]},
        }
    )
    train = load_data(config).train
    kept = Path(path).with_name("kept")
    kept.mkdir(exist_ok=True)
    if hasattr(train, "keep"):  # main before it compared prompts while they are visited
        train.keep(kept)
    visits, cursor = Curriculum(config, train).visits, Cursor()
    if way == DEDUPLICATED[2]:
        cursor = Cursor(0, RESUMED)
    for _ in range(FIRST):
        cursor = train.after(visits.next(cursor).cursor)
    clock, processor = time.perf_counter() - begun, time.process_time() - processor
    status = Path("/proc/self/status").read_text()
    peak = int(re.search(r"VmHWM:\s*(\d+) kB", status)[1]) / 1000  # type: ignore[index]
    if way == DEDUPLICATED[1]:  # for the one that resumes
        while cursor.position < RESUMED:
            cursor = train.after(visits.next(cursor).cursor)
    print(processor, clock, peak)


def deduplicated(options: argparse.Namespace) -> None:
    """Measure and report `--deduplicate`."""
    before = machine()
    found: dict[str, list[tuple[float, float, float]]] = {way: [] for way in DEDUPLICATED}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompts.parquet"
        write_prompts(path, options.prompts, options.repeats)
        write_prompts(path.with_name("set.parquet"), 10_000, options.repeats)
        for _ in range(options.rounds):
            for way in DEDUPLICATED:
                processor, clock, peak = run_part(way, options.model, path, "--deduplicate")
                found[way].append((processor, clock, peak))
    rows = [
        {
            "what": way,
            "processor s": statistics.median(processor for processor, _, _ in times),
            "clock s": statistics.median(clock for _, clock, _ in times),
            "rounds, clock s": " ".join(f"{clock:.2f}" for _, clock, _ in times),
            "peak MB": statistics.median(peak for _, _, peak in times),
        }
        for way, times in found.items()
    ]
    report(
        "prompts-deduplicated" if options.prompts == 1_000_000 else f"prompts-deduplicated-{options.prompts}",
        rows,
        load=before["load_before"],
        prompts=f"{options.prompts:,} of about {190 * options.repeats} characters",
        model=options.model,
        goal="deduplicated <= 5 s, <= 300 MB",
    )


def write_json(parquet: Path) -> None:
    """Write the prompts as JSON lines, and as a JSON array, beside the Parquet file."""
    import pyarrow.parquet

    rows = pyarrow.parquet.read_table(parquet).to_pylist()
    parquet.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.with_suffix(".json").write_text(json.dumps(rows))


def measure_streaming(way: str, model: str, parquet: str) -> None:
    """Print the microseconds of the processor for a row, for a whole prompt and for its comparison."""
    from relaxd.config import RunConfig
    from relaxd.data.dataset import Cursor, PromptDataset, load_data
    from relaxd.data.duplicates import Seen

    suffix = {"JSON lines": ".jsonl", "JSON array": ".json"}.get(way, ".parquet")
    data = {"source": "files", "path": str(Path(parquet).with_suffix(suffix)), "deduplicate": True}
    config = RunConfig.model_validate(
        {"run": {"steps": 1}, "model": {"path": model}, "reward": {"name": "math"}, "data": data}
    )
    loaded = load_data(config)
    train = loaded.train
    if way == "in memory":
        count = len(train)
        kept = [train._examples[index] for index in range(0, count, max(1, count // GIVEN))][:GIVEN]
        train = PromptDataset(kept, loaded.tokenizer, shuffle=True, seed=0, seen=Seen())
    cursor, cursors = Cursor(), []
    for _ in range(GIVEN):
        cursors.append(cursor)
        cursor = train.after(cursor)
    places = [train.index_at(one) for one in cursors]
    begun = time.process_time()
    for place in places:
        train._examples[place]
    rows = time.process_time() - begun
    begun = time.process_time()
    for one in cursors:
        train.prompt(train.index_at(one))
    whole = time.process_time() - begun
    begun = time.process_time()
    for one in cursors:
        train.is_repeat(one)
    print(*(seconds / GIVEN * 1e6 for seconds in (rows, whole, time.process_time() - begun)))


def streaming(options: argparse.Namespace) -> None:
    """Measure and report `--streaming`."""
    before = machine()
    found: dict[str, list[tuple[float, float, float]]] = {way: [] for way in STREAMED}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompts.parquet"
        write_prompts(path, options.prompts, options.repeats)
        write_json(path)
        for _ in range(options.rounds):
            for way in STREAMED:
                row, whole, compared = run_part(way, options.model, path)
                found[way].append((row, whole, compared))
    rows = [
        {
            "what": way,
            "row us": statistics.median(row for row, _, _ in times),
            "prompt us": statistics.median(whole for _, whole, _ in times),
            "compared us": statistics.median(compared for *_, compared in times),
            "rounds, prompt us": " ".join(f"{whole:.0f}" for _, whole, _ in times),
        }
        for way, times in found.items()
    ]
    report(
        "prompts-streaming",
        rows,
        load=before["load_before"],
        prompts=f"{GIVEN:,} of {options.prompts:,} of about {190 * options.repeats} characters, in shuffled order",
        model=options.model,
        time="of the processor",
    )


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=1, help="length of a prompt, in parts of about 190 characters")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streaming", action="store_true", help="measure what a prompt of a large file costs instead")
    parser.add_argument("--deduplicate", action="store_true", help="measure data.deduplicate instead")
    parser.add_argument("--part", choices=(*WAYS, *STREAMED, *DEDUPLICATED), help=argparse.SUPPRESS)
    parser.add_argument("--path", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part and options.deduplicate:
        measure_deduplicated(options.part, options.model, options.path)
        return
    if options.part:
        (measure if options.part in WAYS else measure_streaming)(options.part, options.model, options.path)
        return
    if options.deduplicate:
        deduplicated(options)
        return
    if options.streaming:
        streaming(options)
        return
    before = machine()
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompts.parquet"
        write_prompts(path, options.prompts, options.repeats)
        for _ in range(options.rounds):
            for way in WAYS:
                processor, clock = run_part(way, options.model, path)
                found[way].append((processor, clock))
        size = path.stat().st_size
    rows = [
        {
            "what": way,
            "processor s": statistics.median(processor for processor, _ in times),
            "rounds": " ".join(f"{processor:.2f}" for processor, _ in times),
            "clock s": statistics.median(clock for _, clock in times),
        }
        for way, times in found.items()
    ]
    report(
        "prompts" if options.repeats == 1 else f"prompts-{options.repeats}",
        rows,
        load=before["load_before"],
        prompts=f"{options.prompts:,} of about {190 * options.repeats} characters, {size / 1e6:.0f} MB of Parquet",
        model=options.model,
        tokenizers=importlib.metadata.version("tokenizers"),
        goal="a run's data <= 5 s of processor time",
    )


if __name__ == "__main__":
    main()
