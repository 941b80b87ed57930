"""Check that this machine has the GPUs that a run needs."""

from relaxd.config import RunConfig
from relaxd.config.load import Problem


def check_devices(config: RunConfig, engines: int, visible: int) -> list[Problem]:
    """Return the problems of a run with `engines` engines on a machine with `visible` GPUs.

    Without GPUs, trainer and engines use the CPU. With GPUs, each of their ranks takes one; in a colocated run, a rank
    of the trainer and one of an engine share it.
    """
    transport = config.weights.transport
    if not visible:
        problems = []
        if transport != "gloo":
            needs = f'= "{transport}" needs GPUs, and this machine shows none: use "gloo"'
            problems.append(Problem("weights.transport", needs))
        if config.rollout.engine == "sglang":
            needs = '= "sglang" needs GPUs, and this machine shows none: use "transformers"'
            problems.append(Problem("rollout.engine", needs))
        return problems
    on_gpus = engines * config.rollout.tensor_parallel if config.rollout.engine == "sglang" else 0
    if config.run.colocate:
        return _check_shared(config, engines, on_gpus, visible)
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


def _check_shared(config: RunConfig, engines: int, on_gpus: int, visible: int) -> list[Problem]:
    ranks = config.trainer.ranks
    if config.weights.transport != "cuda_ipc" or config.rollout.engine != "sglang":
        return [
            Problem(
                "run.colocate",
                'on GPUs needs rollout.engine = "sglang" and weights.transport = "cuda_ipc", but they are '
                f'"{config.rollout.engine}" and "{config.weights.transport}"',
            )
        ]
    if on_gpus != ranks:
        return [
            Problem(
                "trainer.ranks",
                f"= {ranks}, but {engines} x rollout.tensor_parallel = {on_gpus} GPUs are the engines': with "
                "run.colocate each GPU has a rank and an engine",
            )
        ]
    if ranks > visible:
        return [Problem("trainer.ranks", f"= {ranks} needs {ranks} GPUs; this machine shows {visible}")]
    return []
