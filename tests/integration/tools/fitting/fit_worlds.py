"""Worlds of ranks that say what they hold: parameters, gradients, the optimizer's state, saved activations."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.integration.trainer.trainer_worlds import VOCAB, make_learner, make_model, trainer_config
from tests.integration.trainer.trainer_worlds import Job as LearnerJob

SIZES = {
    "hidden_size": 96,
    "intermediate_size": 320,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
"""Wide enough that what doesn't grow with the model hardly counts."""
EXPERTS = {"num_experts": 8, "moe_intermediate_size": 80}
LENGTH = 64
"""Tokens of a sequence."""


@dataclass(frozen=True)
class Job:
    """What to measure under one layout."""

    folders: tuple[Path, ...]
    """Models whose parameters are counted; or one of which a learner trains a step."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The trainer's."""
    micro_batches: int = 0
    """Micro-batches of the step; 0: none is trained."""
    prompt: int = 0
    """Tokens that the four sequences of a micro-batch share."""


def write_model(folder: Path, kind: str, *, tied: bool = False, wide: bool = False) -> Path:
    """Write a model; a wide one has SIZES."""
    sizes = {**SIZES, **(EXPERTS if "moe" in kind else {})} if wide else {}
    return make_model(folder, kind, tied=tied, **sizes)


def micro_batch(prompt: int, seed: int) -> Any:
    """Four sequences of equal length, so that attention needs no padding."""
    import numpy as np

    from services.trainer.batch.micro_batch import TrainSequence, pack

    rng, mask, ones = np.random.default_rng(seed), np.ones(LENGTH, np.uint8), np.ones(LENGTH, np.float32)
    mask[: max(prompt, 1)] = 0
    shared = rng.integers(0, VOCAB, prompt)
    columns = {"rollout_logprobs": -5 * ones, "advantages": ones}
    return pack(
        [
            TrainSequence(
                np.concatenate([shared, rng.integers(0, VOCAB, LENGTH - prompt)]),
                mask,
                columns,
                ones * mask,
                mask,
                prompt_length=prompt,
            )
            for _ in range(4)
        ]
    )


def run_job(job: Job, ranks: int = 1) -> dict[str, Any]:
    """Measure on this rank."""
    found = _step(job, ranks) if job.micro_batches else _parameters(job, ranks)
    from tests.kit.megatron_world import leave_layout

    leave_layout()
    return found


def _parameters(job: Job, ranks: int) -> dict[str, Any]:
    """Count the parameters of each model as policy and as critic."""
    from services.trainer.megatron.world import initialize
    from services.trainer.model.architectures import read_architecture
    from services.trainer.model.policy_model import build_critic, build_model, transformer_config

    config = trainer_config(ranks, **job.settings)
    world = initialize(config, 0)
    counts = []
    for folder in job.folders:
        shape = read_architecture(folder)
        models = [build(shape, transformer_config(shape, config), world) for build in (build_model, build_critic)]
        counts.append([sum(parameter.numel() for parameter in model.parameters()) for model in models])
    return {"stage": world.pp_rank, "parameters": counts}


def _step(job: Job, ranks: int) -> dict[str, Any]:
    """Train a step, and measure what that keeps."""
    import torch

    from tests.integration.tools.fitting.saved_tensors import saved_bytes

    learner = make_learner(LearnerJob(job.folders[0], parallel=job.settings), ranks)
    batches = [micro_batch(job.prompt, seed) for seed in range(job.micro_batches)]
    with saved_bytes(learner._policy) as counted:
        learner.accumulate(batches)
    learner.finish(float(sum(batch.loss_mask.sum() for batch in batches)))
    model = learner._model
    states = [state for one in _optimizers(learner._optimizer) for state in one.state.values()]
    return {
        "stage": learner.world.pp_rank,
        "tokens": len(batches[0].tokens),
        "saved": counted.peak,
        "gradients": sum(one.nbytes for one in model.gradient_tensors),
        "moments": sum(
            tensor.nbytes
            for state in states
            for name, tensor in state.items()
            if name.startswith("exp_avg") and isinstance(tensor, torch.Tensor)
        ),
    }


def _optimizers(optimizer: Any) -> list[Any]:
    return [one.optimizer for one in optimizer.chained_optimizers if one.optimizer is not None]
