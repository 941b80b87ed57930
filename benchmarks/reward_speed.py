"""Checks per second of computing time of bundled rewards, beside verl's scorers on the same replies.

    pip install --no-deps --target /tmp/verl verl==0.9.1 mathruler==0.1.0 pylatexenc==2.10
    python -m benchmarks.reward_speed --verl /tmp/verl

mathruler and pylatexenc are what verl's scorer of Geometry3K imports. Without --verl: relaxd's alone. Computing time
counts that of child processes; both sides run one check at a time.
"""

import argparse
import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import psutil

from relaxd.rewards import RewardInput, resolve

SECONDS = 4.0
"""Wall time of a measurement."""
THINKING = "We add the terms one by one and simplify. " * 250
"""About 10,000 characters, as a reasoning model writes before its answer."""
FORMULAS = "We add $\\frac{1}{2}$ to $x_{1}$, simplify, and get $y$. " * 190
"""The same length, with formulas in LaTeX."""
CODE = "def square(x):\n    return x * x\n"
PROGRAM = "for line in range(int(input())):\n    print(int(input()) ** 2)\n"
TEN = list("0123456789")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
}
NO_COMMA = "We think about this in short sentences and without any pause. " * 160


class Case(NamedTuple):
    """A reply to score."""

    reward: str
    reply: str
    answer: str = ""
    module: str = ""
    """verl's module; "" where verl has no scorer, or its says wrong or needs more packages."""
    metadata: dict[str, Any] = {}  # noqa: RUF012 (a tuple's default, which nobody changes)
    settings: dict[str, Any] = {}  # noqa: RUF012
    truth: Any = None
    """verl's ground truth; None: the answer."""


CASES: dict[str, Case] = {
    "gsm8k": Case("gsm8k", f"{THINKING}\n#### 1,234", "1234", "gsm8k"),
    "math, the same number": Case("math", f"{THINKING} \\boxed{{\\frac{{1}}{{2}}}}", "\\frac12", "math_reward"),
    "math, the same number, after formulas": Case(
        "math", f"{FORMULAS} \\boxed{{\\frac{{1}}{{2}}}}", "\\frac12", "math_reward"
    ),
    "math, a decimal for a fraction": Case("math", f"{THINKING} \\boxed{{0.25}}", "\\frac14"),
    "math, by sympy": Case("math", f"{THINKING} \\boxed{{2x + 2}}", "2(x+1)"),
    "deepscaler": Case("deepscaler", f"<think>{THINKING}</think> \\boxed{{\\frac{{1}}{{2}}}}", "\\frac12"),
    "geo3k": Case("geo3k", f"<think>{THINKING}</think> \\boxed{{\\frac{{1}}{{2}}}}", "\\frac{1}{2}", "geo3k"),
    "geo3k, a decimal for a root": Case(
        "geo3k", f"<think>{THINKING}</think> \\boxed{{2\\sqrt{{3}}}}", "\\sqrt{12}", "geo3k"
    ),
    "dapo": Case("dapo", f"{THINKING}\nAnswer: 34", "34", "math_dapo"),
    "openr1mm": Case(
        "openr1mm", f"<think>{THINKING}</think><answer>\\frac{{1}}{{2}}</answer>", "\\frac{1}{2}", "math_verify"
    ),
    "search_r1": Case(
        "search_r1",
        f"<think>{THINKING}</think><answer>Victor Hugo</answer>",
        "Victor Hugo",
        "search_r1_like_qa_em",
        truth={"target": ["Victor Hugo"]},
    ),
    "exact_match": Case("exact_match", THINKING, THINKING),
    "f1": Case("f1", THINKING, "we add the terms"),
    "multiple_choice": Case("multiple_choice", f"{THINKING} The answer is (B).", "B"),
    "gpqa, stated": Case("gpqa", f"<think>{THINKING}</think> The answer is (B).", "B"),
    "gpqa, a letter anywhere": Case("gpqa", f"{THINKING} Of these I take B", "B"),
    "regex": Case("regex", f"<think>{THINKING}</think> 5", settings={"pattern": "(?s)^<think>.*</think>"}),
    "json_schema": Case(
        "json_schema",
        f'<think>{THINKING}</think>\n```json\n{{"name": "Ann", "age": 3}}\n```',
        settings={"schema": SCHEMA},
    ),
    "ifeval, three instructions": Case(
        "ifeval",
        f'"{NO_COMMA}"',
        metadata={
            "instruction_id_list": [
                "punctuation:no_comma",
                "startend:quotation",
                "length_constraints:number_words",
            ],
            "kwargs": [{}, {}, {"num_words": 300, "relation": "at least"}],
        },
    ),
    "ifbench": Case("ifbench", NO_COMMA, metadata={"instruction_id_list": ["count:numbers"], "kwargs": [{"N": 0}]}),
    "code, 10 calls": Case(
        "code",
        f"{THINKING}\n```python\n{CODE}```",
        json.dumps({"fn_name": "square", "inputs": TEN, "outputs": [str(n * n) for n in range(10)]}),
        "prime_code",
    ),
    "code, 10 programs": Case(
        "code",
        f"{THINKING}\n```python\n{PROGRAM}```",
        json.dumps({"inputs": [f"2\n{n}\n3" for n in range(10)], "outputs": [f"{n * n}\n9" for n in range(10)]}),
        "prime_code",
    ),
}
"""Replies by what is shown."""


_NULL = Path(os.devnull).open("w")  # noqa: SIM115 (never closed: packages keep it as what they print to)


def computed() -> float:
    """Return the computing time so far, that of ended and of living children included."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = time.process_time() + ended.ru_utime + ended.ru_stime
    for child in psutil.Process().children(recursive=True):
        times = child.cpu_times()
        total += times.user + times.system + times.children_user + times.children_system
    return total


@contextmanager
def silent() -> Iterator[None]:
    with redirect_stdout(_NULL), redirect_stderr(_NULL):
        yield


def rate(check: Callable[[], Any], seconds: float) -> float:
    """Return checks per second of computing time. Raises AssertionError unless the reply is right."""
    with silent():
        found = check()
        assert (found if isinstance(found, int | float) else found_score(found)) > 0, found
        begun, until, count = computed(), time.monotonic() + seconds, 0
        while time.monotonic() < until:
            check()
            count += 1
        return count / (computed() - begun)


def found_score(found: Any) -> float:
    if not isinstance(found, dict):
        return float(found[0])
    return float(found["reward"] if "reward" in found else found["score"])


def math_verify_alone(reply: str, answer: str) -> float:
    """Score as verl's math_verify.py does, without its process pool."""
    from math_verify import parse, verify

    return float(verify(parse(answer, parsing_timeout=None), parse(reply, parsing_timeout=None), timeout_seconds=None))


def verl_scorer(folder: Path, name: str) -> Callable[..., Any]:
    """Import one of verl's scorers by its file, because verl itself imports ray and torch."""
    if name == "math_verify":
        return math_verify_alone
    package = "verl_reward_score"
    if package not in sys.modules:
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = [str(folder / "verl/utils/reward_score")]
        sys.path.append(str(folder))  # for mathruler
    return importlib.import_module(f"{package}.{name}").compute_score


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verl", type=Path, help="folder that verl was installed into, with --no-deps --target")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="wall time of each measurement")
    words = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, at the start")
    print("| | relaxd | verl | |\n| --- | --- | --- | --- |")
    for shown, case in CASES.items():
        reward = resolve(case.reward, case.settings)
        sample = RewardInput("", case.reply, case.answer, case.metadata)
        ours = rate(lambda reward=reward, sample=sample: reward(sample), words.seconds)
        theirs, compared = "", ""
        if words.verl and case.module:
            scorer = verl_scorer(words.verl, case.module)
            truth = case.answer if case.truth is None else case.truth
            measured = rate(lambda scorer=scorer, case=case, truth=truth: scorer(case.reply, truth), words.seconds)
            theirs, compared = f"{measured:,.4g}/s", f"{ours / measured:.2g}"
        print(f"| {shown} | {ours:,.4g}/s | {theirs} | {compared} |", flush=True)


if __name__ == "__main__":
    main()
