"""Requests fail when the outputs of the engine's process can't be read."""

import contextlib
from pathlib import Path
from typing import Any

import pytest

from relaxd.config import RolloutConfig
from relaxd.process.child import ChildExited
from services.rollout.service import child_engine
from tests.kit.engines import EngineRunner
from tests.kit.models import make_tiny_model


@pytest.mark.slow
def test_an_output_that_cannot_be_read_ends_the_engine_and_its_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(output: Any) -> Any:
        raise ValueError("an output of another release")

    with contextlib.closing(EngineRunner()) as runner:
        runner.start(make_tiny_model(tmp_path / "model"), RolloutConfig(threads=1))
        monkeypatch.setattr(child_engine, "decode_output", broken)
        asked, other = runner.ask([5, 9, 17], 2, max_new_tokens=4), runner.ask([5, 9], max_new_tokens=4)

        async def abort() -> None:
            await runner.engine.abort(asked.request_id)

        runner.run(abort())  # it reports two empty outputs, also without weights
        for each in (asked, other):
            with pytest.raises(ChildExited):
                runner.wait(each)
        runner.wait_until(lambda: runner.exits)  # the report of its end is an event of the runner's loop
