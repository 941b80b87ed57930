"""Worlds of real processes for the trainer's tests: jobs that run on every rank, in one process or in several.

Imports cost seconds, so one spawn does a list of jobs, one after the other, and a world's ranks are forks of one
process that has done them.
"""

import faulthandler
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil

from relaxd.config import TrainerConfig
from relaxd.config.algorithm import ALGORITHM
from tests.kit.ports import free_port
from tests.kit.processes import kill, start_python
from tests.kit.waiting import PATIENCE
from tests.warm.programs import GPU_DRIVER

EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
COLUMNS = ("rollout_logprobs", "advantages")
"""Columns of the samples."""
SHARED_EXPERT: dict[str, Any] = {**EXPERTS, "norm_topk_prob": False, "shared_expert_intermediate_size": 80}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}
SLIDING = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
HYBRID: dict[str, Any] = {
    "head_dim": 32,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 32}),
    "llama3": ("llama", {"attention_bias": True, "rope_parameters": LLAMA3}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": LINEAR}),
    "qwen2_sliding": ("qwen2", SLIDING),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3_yarn": ("qwen3", {"head_dim": 32, "attention_bias": True, "rope_parameters": YARN}),
    "mistral": ("mistral", {"head_dim": 8, "sliding_window": 6}),
    "ministral": (
        "ministral",
        {"head_dim": 16, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "phi3": ("phi3", {"sliding_window": 6, "pad_token_id": None, "eos_token_id": 2}),
    "qwen2_moe": ("qwen2_moe", SHARED_EXPERT),
    "qwen3_moe": ("qwen3_moe", {"head_dim": 32, **EXPERTS, "norm_topk_prob": True}),
    "qwen3_next_moe": ("qwen3_next", {**HYBRID, **SHARED_EXPERT, "norm_topk_prob": True}),
    "qwen3_5_text": ("qwen3_5_text", HYBRID),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", {**HYBRID, **EXPERTS, "shared_expert_intermediate_size": 80}),
    "qwen3_moe_bias": ("qwen3_moe", {"head_dim": 32, **EXPERTS, "attention_bias": True, "rope_parameters": YARN}),
}
"""Models: `model_type` and settings. Windows and contexts are shorter than the samples, so that they matter."""
TP2, PP2 = {"tensor_parallel": 2}, {"pipeline_parallel": 2}
CP2, EP2 = {"context_parallel": 2}, {"expert_parallel": 2}
LAYOUTS: dict[str, dict[str, Any]] = {"TP2": TP2, "PP2": PP2, "DP2": {}, "CP2": CP2}
"""Layouts of two ranks that any model has, by name."""
WORLD_SECONDS = 240.0
"""Longest time of a world on a quiet machine."""
Name = TypeVar("Name", bound=Hashable)
VOCAB = 259
"""Odd, so that two tensor-parallel ranks have to pad it."""


def make_model(folder: Path, kind: str, *, tied: bool = False, **changes: int) -> Path:
    """A random fp32 model, tiny but for `changes`, with sharp logits and norms that aren't all ones: mix-ups show."""
    import torch
    import transformers

    torch.manual_seed(1)
    model_type, own = KINDS[kind]
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
        "tie_word_embeddings": tied,
        **own,
        **changes,
    }
    config = transformers.AutoConfig.for_model(model_type, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    # Published mixtures of Qwen3.5 have stacked experts, as transformers' module has.
    model.save_pretrained(folder, save_original_format=model_type != "qwen3_5_moe_text")
    return folder


def make_samples(
    count: int = 7, seed: int = 0, temperature: float = 1.3, candidates: int = 0, prompt_tokens: int = 0
) -> list[Any]:
    """Samples of different lengths, three to a prompt; in every second response a token is the environment's.

    With `candidates`, a teacher gives each token so many, of which some are missing. With `prompt_tokens`, all have one
    prompt of so many.
    """
    from services.trainer.batch.micro_batch import TrainSequence

    rng, of_teacher = np.random.default_rng(seed), np.random.default_rng(seed + 1)
    samples: list[TrainSequence] = []
    prompt = np.zeros(1, np.int64)
    for i in range(count):
        if i == 0 or (i % 3 == 0 and not prompt_tokens):
            prompt = rng.integers(0, VOCAB, prompt_tokens or int(rng.integers(2, 20)))
        length = int(rng.integers(3, 12))
        mask = np.ones(length, np.uint8)
        if i % 2:
            mask[1:2] = 0
        samples.append(
            TrainSequence.from_response(
                prompt,
                rng.integers(0, VOCAB, length),
                loss_mask=mask,
                columns={
                    "rollout_logprobs": rng.normal(-5, 0.5, length).astype(np.float32),
                    "advantages": rng.normal(0, 1, length).astype(np.float32),
                    **(made_up_candidates(of_teacher, length, candidates) if candidates else {}),
                },
                weight=mask.astype(np.float32),
                temperature=temperature,
            )
        )
    return samples


def made_up_candidates(random: np.random.Generator, tokens: int, count: int) -> dict[str, Any]:
    """The columns of a teacher's candidates: different ids in each place, every fourth of them missing."""
    ids = np.stack([random.permutation(VOCAB)[:count] for _ in range(tokens)]).astype(np.int32)
    logprobs = np.log(random.dirichlet(np.ones(count + 1), tokens)[:, :count]).astype(np.float32)
    return {"candidates": np.where(ids % 4 == 0, -1, ids), "teacher_candidate_logprobs": logprobs}


def micro_batches(
    samples: list[Any], budget: int, dp_size: int = 1, columns: Sequence[str] = COLUMNS
) -> list[list[Any]]:
    """Packed micro-batches of at most `budget` tokens for each data-parallel rank, which have equally many."""
    from services.trainer.batch.micro_batch import empty_micro_batch, pack
    from services.trainer.batch.micro_batch_division import Packer

    packer = Packer(budget, dp_size)
    for index, sample in enumerate(samples):
        packer.add(f"{index:03}", sample.prompt_length, [len(sample.tokens) - sample.prompt_length])
    rest = packer.rest()
    assert rest is not None
    return [
        [
            pack([samples[int(piece.group_id)] for piece in sorted(micro_batch, key=lambda piece: piece.group_id)])
            if micro_batch
            else empty_micro_batch(columns)
            for micro_batch in share
        ]
        for share in rest.micro_batches
    ]


@dataclass(frozen=True)
class Job:
    """What to do with one learner on every rank."""

    model: Path
    parallel: dict[str, Any] = field(default_factory=dict)
    """Parallel sizes, and other settings of the trainer."""
    algorithm: dict[str, Any] = field(default_factory=dict)
    steps: int = 0
    samples: int = 7
    pieces: int = 1
    """Micro-batches per data-parallel rank and step."""
    one_schedule: bool = False
    """Train a step's micro-batches in one schedule, instead of the first one alone and then the others."""
    gather_beside: bool = False
    """Gather weights in a thread while the gradients are accumulated."""
    nap: bool = False
    """Move everything to the host's memory and back in the middle of each step."""
    logits: bool = False
    candidates: int = 0
    """Candidates that the samples have; also the number of the likeliest tokens to find."""
    frozen: dict[str, dict[str, Path]] | None = None
    """As `Learner`'s."""
    save: Path | None = None


def trainer_config(ranks: int = 1, **parallel: Any) -> TrainerConfig:
    """A fp32 configuration with a learning rate large enough to see differences grow."""
    optimizer = {"lr": 1e-2, "min_lr": 1e-3, "schedule": "cosine", "warmup_steps": 1, "weight_decay": 0.1}
    optimizer |= parallel.pop("optimizer", {})
    settings: dict[str, Any] = {
        "ranks": ranks,
        "threads": 1,
        "collective_timeout_seconds": 60.0,
        "optimizer": optimizer,
        **parallel,
    }
    return TrainerConfig.model_validate(settings)


def make_learner(job: Job, ranks: int = 1) -> Any:
    """The learner of a job, in whatever world this process is in."""
    from services.trainer.learner.learner import Learner

    wide = {} if "name" in job.algorithm else {"clip_low": 0.5, "clip_high": 5.0}
    algorithm = ALGORITHM.validate_python({**wide, **job.algorithm})
    config = trainer_config(ranks, **job.parallel)
    return Learner(job.model, config, algorithm, steps=4, seed=3, frozen=job.frozen)


def full_logits(learner: Any, batch: Any) -> np.ndarray:
    """All logits of a micro-batch, float64 [T, vocabulary], on the last stage (elsewhere an empty array).

    Only what the model itself computes is rounded, not the product with the output layer.
    """
    import torch
    import torch.distributed as dist
    from megatron.core import tensor_parallel

    def last(weight: Any, inputs: Any, hidden: Any) -> Any:
        if learner.world.tp_size > 1:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden)
        mine = hidden.squeeze(1).double() @ weight.double().t()
        shards = [torch.empty_like(mine) for _ in range(learner.world.tp_size)]
        dist.all_gather(shards, mine, group=learner._forward.vocab.group) if len(shards) > 1 else shards[0].copy_(mine)
        logits = torch.cat(shards, -1)[: len(batch.tokens), :VOCAB]
        return hidden.new_zeros(()), torch.zeros((), dtype=torch.int), {"logits": logits}

    with torch.no_grad():
        outputs = learner._forward.run(learner._model, [batch], last, forward_only=True)
    return outputs[0]["logits"].numpy() if outputs else np.zeros(0)


def log_probs_of(logits: np.ndarray, batch: Any) -> np.ndarray:
    """The log-probs of a micro-batch's trained tokens from `full_logits`, float64 [T]; 0 for other tokens."""
    places = np.flatnonzero(batch.loss_mask)
    tempered = logits[batch.previous[places]] / batch.temperature[places, None].astype(np.float64)
    found = np.zeros(len(batch.tokens))
    found[places] = tempered[np.arange(len(places)), batch.tokens[places]] - np.log(np.exp(tempered).sum(-1))
    return found


def run_job(job: Job, ranks: int = 1) -> dict[str, Any]:
    """Run one job on this rank."""
    from services.trainer.batch.micro_batch import pack

    learner = make_learner(job, ranks)
    samples = make_samples(job.samples, candidates=job.candidates)
    columns = samples[0].columns
    result: dict[str, Any] = {"trajectory": [], "stage": learner.world.pp_rank, "source": learner.world.gather.source}
    everything = [pack(samples[:3]), pack(samples[3:])]
    result["logprobs"] = learner.log_probs(everything)
    if job.candidates:
        forward, policy = learner._forward, learner._model
        result["likeliest"] = forward.likeliest(policy, everything, job.candidates, ids_below=VOCAB)
        result["candidates"] = forward.candidate_log_probs(policy, everything)
    if job.logits:
        batch = pack(samples, share_prompts=False)
        result["logits"] = logits = full_logits(learner, batch)
        (ours,) = learner.log_probs([batch])
        result["head_error"] = float(np.abs(ours - log_probs_of(logits, batch)).max()) if logits.size else None
    for _ in range(job.steps):
        dp_size = learner.world.dp_size
        total = sum(len(sample.tokens) for sample in samples)
        budget = -(-total // (job.pieces * dp_size)) + 8
        batches = micro_batches(samples, budget, dp_size, columns)[learner.world.dp_rank]
        beside: dict[str, Any] = {}
        thread = threading.Thread(target=lambda into=beside: into.update(copied(learner)))
        if job.gather_beside:
            thread.start()
        # In two calls, as micro-batches of a stream come.
        first = len(batches) if job.one_schedule else 1
        learner.accumulate(batches[:first])
        if job.nap:
            learner.offload()
            learner.onload()
        learner.accumulate(batches[first:])
        if job.gather_beside:
            thread.join(60)
            result["beside"] = beside
        stats = learner.finish(float(sum(int(sample.loss_mask.sum()) for sample in samples)))
        result["trajectory"].append(stats)
    result["specs"] = [(s.name, str(s.dtype), s.shape, s.stage) for s in learner.hf_tensor_specs()]
    result["tensors"] = copied(learner)
    if job.save:
        # A broadcast may gather at any time, also while the weights are saved.
        result["beside_save"] = gathered = []
        thread = threading.Thread(target=lambda: gathered.extend(copied(learner) for _ in range(10)))
        thread.start()
        for _ in range(3):
            learner.save_hf(job.save)
        thread.join(60)
    from tests.kit.megatron_world import leave_layout

    leave_layout()
    return result


def copied(learner: Any) -> dict[str, np.ndarray]:
    """This rank's gathered tensors."""
    return {name: tensor.float().cpu().numpy().copy() for name, tensor in learner.iter_hf_tensors()}


def run_world(jobs: Sequence[Any], ranks: int, folder: Path) -> list[list[dict[str, Any]]]:
    """Run jobs in a world of `ranks` gloo processes. Each is run by `run_job(job, ranks)` of its class's module.

    Returns:
        For each job the results of each rank.
    """
    folder.mkdir(exist_ok=True)
    (folder / "jobs.pickle").write_bytes(pickle.dumps(jobs))
    environment = _meeting_place(ranks, free_port())
    process = start_python(
        *("-m", __name__, str(folder)),
        environment=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output = process.communicate(timeout=WORLD_SECONDS * PATIENCE)[0]
    finally:
        if process.poll() is None:
            for member in psutil.Process(process.pid).children():
                member.kill()
        kill(process)
    assert process.returncode == 0, f"a rank failed:\n{output}"
    by_rank = [pickle.loads((folder / f"rank-{rank}.pickle").read_bytes()) for rank in range(ranks)]
    return [list(results) for results in zip(*by_rank, strict=True)]


def run_named(jobs: Mapping[Name, Any], ranks: int, folder: Path) -> dict[Name, list[dict[str, Any]]]:
    """Run jobs that have names in one world. Returns the results of each rank by the job's name."""
    return dict(zip(jobs, run_world(list(jobs.values()), ranks, folder), strict=True))


def start_ranks(program: str, *words: str, ranks: int, port: int, **options: Any) -> "list[subprocess.Popen[str]]":
    """Start `python -m PROGRAM WORDS` for each rank of a gloo world that meets at `port`."""
    environment = _meeting_place(ranks, port)
    return [
        start_python(
            "-m", program, *words, environment=environment | {"RANK": str(rank)},
            stdout=subprocess.PIPE, text=True, **options,
        )
        for rank in range(ranks)
    ]  # fmt: skip


def _meeting_place(ranks: int, port: int) -> dict[str, str]:
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}


def work() -> None:
    """Be a world: import what every rank needs, then run every job in a fork per rank. One that fails ends all.

    Where there are GPUs each rank is a new process: a fork has none, if an import has asked for them before.
    """
    import services.trainer.learner.learner  # noqa: F401

    method: Any = multiprocessing.get_context("spawn" if GPU_DRIVER.exists() else "fork")
    jobs = pickle.loads(Path(sys.argv[1], "jobs.pickle").read_bytes())
    members = [method.Process(target=_be_rank, args=(jobs, rank)) for rank in range(int(os.environ["WORLD_SIZE"]))]
    for member in members:
        member.start()
    running = members
    while running:
        connection.wait([member.sentinel for member in running])
        if failed := [rank for rank, member in enumerate(members) if member.exitcode]:
            for member in running:
                member.kill()
            sys.exit(f"rank {failed[0]} ended with {members[failed[0]].exitcode}")
        running = [member for member in running if member.exitcode is None]


def _be_rank(jobs: Sequence[Any], rank: int) -> None:
    faulthandler.enable()
    os.environ["RANK"] = str(rank)
    folder, ranks = Path(sys.argv[1]), int(os.environ["WORLD_SIZE"])
    results = [sys.modules[type(job).__module__].run_job(job, ranks) for job in jobs]
    (folder / f"rank-{rank}.pickle").write_bytes(pickle.dumps(results))
    import torch.distributed as dist

    dist.destroy_process_group()


if __name__ == "__main__":
    # Under its own name, or the pickled jobs would be of another class than __main__'s.
    from tests.integration.trainer import trainer_worlds

    trainer_worlds.work()
