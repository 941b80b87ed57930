"""The ranks of offline programs."""

import pytest

from relaxd.replica.gpus import Gpu
from services.trainer.offline import program_parts
from services.trainer.offline.program_parts import OfflineError, start_ranks
from tests.integration.trainer.service_kit import make_config


def test_ranks_of_several_hosts_need_a_gpu_each_here(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config("model", trainer={"ranks": 16, "hosts": 2})
    monkeypatch.setattr(program_parts, "visible_gpus", lambda: tuple(Gpu(f"GPU-{n}", n) for n in range(8)))
    with pytest.raises(OfflineError, match=r"has 16 ranks on 2 hosts.*shows 8 GPUs: do this on a machine with 16"):
        start_ranks("module", config, [])
