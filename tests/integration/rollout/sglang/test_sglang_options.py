"""What [rollout.sglang] may say, and what SGLang gets."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kit.processes import run_python
from tests.sglang.environment import CPU_ENVIRONMENT, CPU_OPTIONS

CASES: list[tuple[dict[str, object], str]] = [
    (dict(CPU_OPTIONS), ""),
    ({"attention_backend": "triton", "mamba_full_memory_ratio": 1, "json_model_override_args": "{}"}, ""),
    ({"max_total_token": 5}, "rollout.sglang.max_total_token is not an option of SGLang 0.5.15.post1"),
    ({"max-total-tokens": 5}, "; did you mean max_total_tokens?"),
    ({"xyzzy": 5}, "rollout.sglang.xyzzy is not an option of SGLang 0.5.15.post1"),
    ({"tp_size": 2}, "rollout.sglang.tp_size is set by relaxd itself: use rollout.tensor_parallel"),
    ({"speculative_algorithm": "EAGLE"}, "rollout.sglang.speculative_algorithm cannot be set: relaxd"),
    ({"max_total_tokens": "many"}, "rollout.sglang.max_total_tokens is 'many', a str: it must be Optional[int]"),
    ({"chunked_prefill_size": True}, "rollout.sglang.chunked_prefill_size is True, a bool: it must be Optional[int]"),
    ({"disable_cuda_graph": 1}, "rollout.sglang.disable_cuda_graph is 1, a int: it must be bool"),
    ({"sampling_backend": "pytorhc"}, "did you mean pytorch?"),
]  # fmt: skip


def test_options_are_checked_by_name_and_type_and_memory_follows_the_share(python: str, model: Path) -> None:
    rollout: dict[str, Any] = {"engine": "sglang", "sglang": CPU_OPTIONS | {"chunked_prefill_size": 2048}}
    of_it = rollout | {"memory_fraction": 0.6}
    memory = [(rollout, 1.0), (rollout, 0.7), (rollout, 0.01), (of_it, 1.0), (of_it, 0.7)]
    cases = [case for case, _ in CASES], [(str(model), *case) for case in memory]
    words = ["-m", "tests.integration.rollout.sglang.option_cases", *map(json.dumps, cases)]
    run = run_python(*words, python=python, environment=CPU_ENVIRONMENT)
    assert run.returncode == 0, run.stderr
    lines = [json.loads(line) for line in run.stdout.splitlines()[-len(CASES) - len(memory) :]]
    for (case, right), said in zip(CASES, lines[: len(CASES)], strict=True):
        assert (said == "") == (right == ""), case
        assert right in said, case
    whole, part, tiny, given, given_part = lines[len(CASES) :]
    assert 0.3 < whole < 1  # by the machine's memory
    assert (1 - part) * 0.7 == pytest.approx(1 - whole)  # as many bytes are kept free
    assert "the engine has only 0.01 of it (roles.judge.gpu_share)" in tiny
    assert given == given_part == 0.6  # of the GPU, and of the share
