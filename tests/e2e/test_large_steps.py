"""A step of the size that real runs have, with default settings, on a model whose answers happen to be short."""

import json

import pytest

from tests.e2e.conftest import Workplace
from tests.kit.finished_runs import check_books, read_summary
from tests.kit.models import make_tiny_model

CONFIG = """
[run]
steps = 2

[model]
path = "model"

[data]
source = "addition"
digits = 1

[reward]
name = "tiny_reward:even_bytes"

[rollout]
samples_per_prompt = 4
max_new_tokens = 65536

[trainer]
groups_per_step = 128
micro_batch_tokens = 81920
"""


@pytest.mark.night
@pytest.mark.timeout(600)
def test_three_runs_with_large_steps_on_one_redis(workplace: Workplace) -> None:
    """Their worst case is 1.1 GB a step, and the high-water mark is 1 GiB."""
    model = make_tiny_model(workplace.folder / "model", max_position_embeddings=131_072, num_hidden_layers=1)
    generation = json.loads((model / "generation_config.json").read_text())
    generation["eos_token_id"] = list(range(2, 259, 5))  # an answer ends after five tokens or so
    (model / "generation_config.json").write_text(json.dumps(generation))
    (workplace.folder / "large.toml").write_text(CONFIG)
    code, output = workplace.relaxd("up", "--port", "0", RELAXD_REDIS_MAXMEMORY="1280mb")
    assert code == 0, output
    for name, steps in (("first", 2), ("second", 1), ("third", 1)):
        code, output = workplace.relaxd("run", "large.toml", "--run-id", name, "--run.steps", str(steps), timeout=400)
        assert code == 0, output
        check_books(read_summary(workplace.folder / "runs" / name), steps, groups_per_step=128)
