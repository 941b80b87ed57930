"""Conversations of a run whose trainer and SGLang engine take turns on one GPU."""

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.conftest import Workplace
from tests.e2e.echo_environment import ENVIRONMENT
from tests.gpu.run_kit import CHANGES, make_workplace, train

pytestmark = pytest.mark.skipif(find_spec("sglang") is None, reason="needs the extra sglang")

TURNS = 3
AGENT = f"""\
[agent]
environment = "echo.py:Echo"
settings = {{{{turns = {TURNS}}}}}
turn_tokens = 64

[reward]
name = "environment\""""
CONVERSATIONS = (
    *CHANGES,
    ('[reward]\nname = "tiny_reward:even_bytes"', AGENT),
    ("max_new_tokens = 64", "max_new_tokens = 300"),
    # Random models rarely end a message by themselves.
    ("[rollout.sglang]", f"stop_token_ids = {json.dumps([2, *range(40, 140)])}\n\n[rollout.sglang]"),
)
SIZES = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}


@pytest.mark.timeout(380)
def test_conversations_of_a_colocated_run(
    tmp_path: Path, end: list[Workplace], facts: Callable[[str, object], None]
) -> None:
    place = make_workplace(tmp_path, CONVERSATIONS, architecture="qwen3", **SIZES, **HEADS)
    end.append(place)
    (place.folder / "echo.py").write_text(ENVIRONMENT)
    _, lines = train(place, CUDA_VISIBLE_DEVICES="0")
    for line in lines:
        assert 1 < line["turns_mean"] <= line["turns_max"] <= TURNS
        assert line["environment/letters"] > 0
        assert line["environment_reward_mean"] == pytest.approx(line["reward_mean"])
        assert line["observation_tokens_mean"] > 0
    facts("step_seconds", lines[-1]["step_seconds"])
    facts("switch_seconds", lines[-1]["switch_seconds"])
    facts("turns_mean", lines[-1]["turns_mean"])
