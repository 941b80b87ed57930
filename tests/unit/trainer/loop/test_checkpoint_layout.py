"""Whether a checkpoint is of the trainer's parallel layout."""

from pathlib import Path
from typing import Any

import pytest

from services.trainer.loop.checkpoint_control import same_layout
from tests.integration.trainer.service_kit import make_config
from tests.unit.trainer.loop.checkpoint_states import state

PIPELINE = {"ranks": 2, "pipeline_parallel": 2}
CHUNKS = {**PIPELINE, "pipeline_chunks": 2}


@pytest.mark.parametrize(
    ("written", "now", "same"),
    [
        (PIPELINE, PIPELINE, True),
        (PIPELINE, CHUNKS, False),
        (CHUNKS, PIPELINE, False),
        (CHUNKS, CHUNKS, True),
        (PIPELINE, {"ranks": 2, "tensor_parallel": 2}, False),
    ],
)
def test_chunks_are_part_of_the_layout(written: dict[str, Any], now: dict[str, Any], same: bool) -> None:
    saved = make_config(Path("model"), trainer=written).trainer.model_dump(mode="json")
    config = make_config(Path("model"), trainer=now)
    assert same_layout(state(1).model_copy(update={"trainer": saved}), config) == same
    if written == PIPELINE:  # as an earlier release wrote it
        del saved["pipeline_chunks"]
        assert same_layout(state(1).model_copy(update={"trainer": saved}), config) == same
