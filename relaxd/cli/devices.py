"""Whether this machine has the GPUs that a run needs."""

from relaxd.config import RunConfig
from relaxd.config.load import Problem


def check_devices(config: RunConfig, engines: int, visible: int) -> list[Problem]:
    """What keeps a run with so many engines from working on a machine that shows `visible` GPUs.

    Without GPUs, trainer and engines work on the CPU; with them, each rank of both takes one of its own.
    """
    if not visible:
        if config.weights.transport == "nccl":
            return [Problem("weights.transport", '= "nccl" is for GPUs, and none are to be seen here: use "gloo"')]
        return []
    on_gpus = engines * config.rollout.tensor_parallel if config.rollout.engine == "sglang" else 0
    needed = config.trainer.ranks + on_gpus
    if needed <= visible:
        return []
    engine_words = f" and {engines} x rollout.tensor_parallel = {on_gpus} of the engines" if on_gpus else ""
    return [
        Problem(
            "trainer.ranks",
            f"= {config.trainer.ranks}{engine_words} need {needed} GPUs; this machine shows {visible}",
        )
    ]
