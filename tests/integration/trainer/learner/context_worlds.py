"""Ranks that compute log-probs, experts and gradients of one micro-batch, for tests of context parallelism."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.integration.trainer.trainer_worlds import COLUMNS, make_learner, make_samples
from tests.integration.trainer.trainer_worlds import Job as LearnerJob

ALGORITHM = {"kl_coef": 0.1, "entropy_coef": 0.01}
EXPERTS, TOP_K, LAYERS = 4, 2, 2


@dataclass(frozen=True)
class Job:
    """A model and settings of the trainer."""

    model: Path
    settings: dict[str, Any] = field(default_factory=dict)
    replay: bool = False
    """Give the routers experts, and record them in the pass before."""
    prompt_tokens: int = 0
    """Tokens of a prompt that all samples share; 0: short ones that some share."""
    prompts_once: bool = False
    """Whether attention may take the queries of shared prompts once. On CPUs it doesn't by itself."""


def run_job(job: Job, ranks: int = 1) -> dict[str, Any]:
    """Return log-probs, recorded experts, loss, gradient norm, and (without other divisions) gradients by name."""
    import torch.distributed as dist

    from services.trainer.batch.micro_batch import pack
    from tests.kit.megatron_world import leave_layout

    samples = make_samples(prompt_tokens=job.prompt_tokens)
    settings = {**job.settings, **({"routing_replay": "rollout"} if job.replay else {})}
    learner = make_learner(LearnerJob(job.model, settings, {**ALGORITHM, "old_logprobs": "rollout"}), ranks)
    learner._forward._to_device.keywords["prompts_once"] = job.prompts_once
    result: dict[str, Any] = {}
    if job.replay:
        _, result["experts"] = learner.log_probs_and_experts([pack(samples)])
        random = np.random.default_rng(7)
        samples = [
            replace(
                one,
                experts=np.stack(
                    [random.permutation(EXPERTS)[:TOP_K] for _ in range(len(one.tokens) * LAYERS)]
                ).reshape(-1, LAYERS, TOP_K).astype(np.int16),
            )
            for one in samples
        ]  # fmt: skip
    batch = pack(samples)
    result["sliced"] = learner._forward._to_device(batch).layout.query_slice is not None
    assert set(COLUMNS) <= batch.columns.keys()
    (result["logprobs"],) = learner.log_probs([batch])
    learner.accumulate([batch, batch])
    if learner.world.tp_size == learner.world.pp_size == 1:
        result["gradients"] = {}
        for name, parameter in learner._policy.named_parameters():
            gradient = parameter.main_grad.clone()
            if ranks > 1:
                dist.all_reduce(gradient)
            result["gradients"][name] = gradient.numpy()
    stats = learner.finish(float(2 * sum(int(sample.loss_mask.sum()) for sample in samples)))
    result |= {"loss": stats.loss, "grad_norm": stats.grad_norm}
    leave_layout()
    return result
