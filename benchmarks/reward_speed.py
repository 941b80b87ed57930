"""Checks per second of computing time of bundled rewards, beside verl's scorers on the same replies.

    pip install --no-deps --target /tmp/verl verl==0.9.1
    python -m benchmarks.reward_speed --verl /tmp/verl

Without --verl: relaxd's alone. Computing time counts that of child processes; both sides run one check at a time.
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
from typing import Any

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
CASES: dict[str, tuple[str, str, str, str]] = {
    "gsm8k": ("gsm8k", f"{THINKING}\n#### 1,234", "1234", "gsm8k"),
    "math, the same number": ("math", f"{THINKING} \\boxed{{\\frac{{1}}{{2}}}}", "\\frac12", "math_reward"),
    "math, the same number, after formulas": (
        "math", f"{FORMULAS} \\boxed{{\\frac{{1}}{{2}}}}", "\\frac12", "math_reward",
    ),
    "math, a decimal for a fraction": ("math", f"{THINKING} \\boxed{{0.25}}", "\\frac14", ""),
    "math, by sympy": ("math", f"{THINKING} \\boxed{{2x + 2}}", "2(x+1)", ""),
    "dapo": ("dapo", f"{THINKING}\nAnswer: 34", "34", "math_dapo"),
    "openr1mm": (
        "openr1mm", f"<think>{THINKING}</think><answer>\\frac{{1}}{{2}}</answer>", "\\frac{1}{2}", "math_verify",
    ),
    "code, 10 calls": (
        "code", f"{THINKING}\n```python\n{CODE}```",
        json.dumps({"fn_name": "square", "inputs": TEN, "outputs": [str(n * n) for n in range(10)]}), "prime_code",
    ),
    "code, 10 programs": (
        "code", f"{THINKING}\n```python\n{PROGRAM}```",
        json.dumps({"inputs": [f"2\n{n}\n3" for n in range(10)], "outputs": [f"{n * n}\n9" for n in range(10)]}),
        "prime_code",
    ),
}  # fmt: skip
"""By what is shown: reward, reply, answer, and verl's module; "" where verl's says wrong or needs more packages."""


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
    with Path(os.devnull).open("w") as null, redirect_stdout(null), redirect_stderr(null):
        yield


def rate(check: Callable[[], Any]) -> float:
    """Return checks per second of computing time. Raises AssertionError unless the reply is right."""
    with silent():
        found = check()
        assert (found if isinstance(found, int | float) else found_score(found)) > 0, found
        begun, until, count = computed(), time.monotonic() + SECONDS, 0
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
    return importlib.import_module(f"{package}.{name}").compute_score


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verl", type=Path, help="folder that verl was installed into, with --no-deps --target")
    words = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, at the start")
    print("| | relaxd | verl | |\n| --- | --- | --- | --- |")
    for shown, (name, reply, answer, module) in CASES.items():
        reward = resolve(name)
        sample = RewardInput("", reply, answer)
        ours = rate(lambda reward=reward, sample=sample: reward(sample))
        theirs, compared = "", ""
        if words.verl and module:
            scorer = verl_scorer(words.verl, module)
            measured = rate(lambda scorer=scorer, reply=reply, answer=answer: scorer(reply, answer))
            theirs, compared = f"{measured:,.4g}/s", f"{ours / measured:.2g}"
        print(f"| {shown} | {ours:,.4g}/s | {theirs} | {compared} |", flush=True)


if __name__ == "__main__":
    main()
