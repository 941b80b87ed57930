"""What [rollout.sglang] may say."""

import json
import os
import subprocess
from pathlib import Path

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


def test_options_are_checked_by_name_and_type(python: str) -> None:
    command = [python, "-m", "tests.integration.rollout.sglang.option_cases", json.dumps([case for case, _ in CASES])]
    root = Path(__file__).parents[4]
    environment = {**os.environ, **CPU_ENVIRONMENT}
    run = subprocess.run(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    for (case, right), line in zip(CASES, run.stdout.splitlines()[-len(CASES) :], strict=True):
        said = json.loads(line)
        assert (said == "") == (right == ""), case
        assert right in said, case
