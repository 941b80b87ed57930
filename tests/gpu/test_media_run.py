"""Whole runs on media on one GPU, colocated: SGLang sees and hears with the towers that Megatron trains."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.conftest import Workplace
from tests.kit.media_run import CASES, check_media_run, make_place, train_on_media

pytestmark = pytest.mark.skipif(find_spec("sglang") is None, reason="needs the extra sglang")

DEADLINE_SECONDS = 120.0
"""Of a run, whose engine alone may take a minute to start."""


@pytest.mark.timeout(200)
@pytest.mark.parametrize("model", CASES)
def test_towers_that_are_trained_reach_the_engine(
    model: str, tmp_path: Path, redis_url: str, end: list[Workplace], facts: Callable[[str, object], None]
) -> None:
    """The last step's log-probs are those of the towers before it, and far from those of the first ones."""
    case = CASES[model]
    place = make_place(tmp_path, case, "sglang")
    end.append(place)
    run = train_on_media(place, case, redis_url, DEADLINE_SECONDS, CUDA_VISIBLE_DEVICES="0")
    for name, value in run.facts().items():
        facts(name, value)
    check_media_run(run)
