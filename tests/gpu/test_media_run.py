"""Whole runs on media, colocated and on two GPUs: SGLang sees and hears with the towers that Megatron trains."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.conftest import Workplace
from tests.kit.media_run import CASES, check_media_run, make_place, train_on_media

pytestmark = pytest.mark.skipif(find_spec("sglang") is None, reason="needs the extra sglang")

DEADLINE_SECONDS = 200.0
"""Of a run, whose kernels alone may take two minutes to compile."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", CASES)
def test_towers_that_are_trained_reach_the_engine(
    model: str, tmp_path: Path, redis_url: str, end: list[Workplace], facts: Callable[[str, object], None]
) -> None:
    """The last step's log-probs are those of the towers before it, and far from those of the first ones."""
    _train(model, "sglang", "0", tmp_path, redis_url, end, facts)


@pytest.mark.gpu(2)
@pytest.mark.timeout(300)
def test_towers_that_are_trained_reach_an_engine_on_another_gpu(
    tmp_path: Path, redis_url: str, end: list[Workplace], facts: Callable[[str, object], None]
) -> None:
    """NCCL brings them."""
    _train("qwen3_vl", "sglang-apart", "0,1", tmp_path, redis_url, end, facts)


def _train(
    model: str,
    engine: str,
    gpus: str,
    folder: Path,
    redis_url: str,
    end: list[Workplace],
    facts: Callable[[str, object], None],
) -> None:
    case = CASES[model]
    place = make_place(folder, case, engine)
    end.append(place)
    run = train_on_media(place, case, redis_url, DEADLINE_SECONDS, CUDA_VISIBLE_DEVICES=gpus)
    for name, value in run.facts().items():
        facts(name, value)
    check_media_run(run)
