"""The start of an external engine without a server."""

from pathlib import Path

import pytest

from relaxd.config.load_toml import load
from relaxd.process.child import ChildError
from relaxd.rpc.service_settings import ServiceSettings
from services.rollout.engines.engine_interface import EngineStart
from services.rollout.engines.sglang_external.external_engine import start_engine

RUN = """
run.steps = 1
model.path = "model"
data.source = "addition"
reward.name = "addition"
rollout.engine = "sglang_external"
"""


async def test_a_replica_without_a_server_is_told_how_to_name_it() -> None:
    start = EngineStart(
        config=load(RUN),
        folder=Path(),
        settings=ServiceSettings(role="rollout"),
        environment={},
        gpu_lease=None,
        set_detail=print,
        on_exit=print,
        on_tokens=print,
    )
    with pytest.raises(ChildError, match="has no server: start it with --sglang-url / RELAXD_SGLANG_URL"):
        await start_engine(start)
