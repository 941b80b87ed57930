"""How long the schedules of forward passes are, while a step fills."""

from pathlib import Path
from typing import Any, cast

import pytest

from relaxd.algorithms import create
from services.trainer.loop.step_phases import PreparedThenTrained, TrainedWhileFilling
from tests.integration.trainer.service_kit import make_config


@pytest.mark.parametrize("phases", [PreparedThenTrained, TrainedWhileFilling])
@pytest.mark.parametrize(("stages", "ranks", "schedule"), [(1, 1, 1), (2, 2, 20), (4, 4, 60), (2, 4, 20)])
def test_a_pipeline_starts_with_a_whole_schedule(phases: Any, stages: int, ranks: int, schedule: int) -> None:
    """Filling and draining a pipeline of p stages costs p - 1 micro-batches, with or without a backward pass."""
    trainer = {"ranks": ranks, "pipeline_parallel": stages, "micro_batch_tokens": 32}
    config = make_config(Path("model"), trainer=trainer)
    packer = phases(config, create(config.algorithm), cast(Any, None)).packer()
    entry, fed = None, 0
    while entry is None:
        fed += 1
        packer.add(f"g{fed}", 16, [16])
        entry = packer.full_round()
    assert [len(share) for share in entry.micro_batches] == [schedule] * (ranks // stages)
    assert fed == (schedule + 1) * (ranks // stages)
