"""verl: synchronous on one GPU, in its hybrid engine; fully asynchronous on two, each with SGLang as rollout, and FSDP.

The asynchronous mode sends weights by CuPy's NCCL (pip install cupy-cuda13x), after each step. The engine gets the
options that relaxd's gets, the trainer micro-batches by tokens, without recomputation. `--extra` takes further
settings, such as algorithm.rollout_correction.bypass_mode=true, which takes the engine's log-probs instead of computing
them again.
"""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.modes import sglang_options
from benchmarks.peers import flash_attention
from benchmarks.peers.watch import Launch
from benchmarks.peers.workload import MAX_PROMPT_TOKENS, REWARD, Workload

LENGTH = "response_length/mean"
PROBABILITY_GAP = "training/rollout_probs_diff_mean"
NO_TRL = "class AutoModelForCausalLMWithValueHead: ...\n"
"""Hides TRL: verl changes this class if `trl` can be imported, and TRL 1.16 no longer has it."""
RAY = ("include_dashboard=False", f"object_store_memory={4 * 2**30}")
CROSS_ENTROPY = "flash_attn/ops/triton/cross_entropy.py"
CORES = 64
"""Cores that Ray counts in the asynchronous mode, whose services ask for more than a machine of two GPUs may have."""
MODES = {1: "verl.trainer.main_ppo", 2: "verl.experimental.fully_async_policy.fully_async_main"}
"""Modules of the synchronous and of the asynchronous mode."""


def settings(work: Workload, folder: Path) -> dict[str, Any]:
    """Return the settings that differ from verl's defaults."""
    rollout = "actor_rollout_ref.rollout"
    actor = "actor_rollout_ref.actor"
    return {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": f"{folder}/prompts.jsonl",
        "data.val_files": f"{folder}/prompts.jsonl",
        "data.train_batch_size": work.prompts,
        "data.max_prompt_length": MAX_PROMPT_TOKENS,
        "data.max_response_length": work.longest,
        "data.shuffle": False,
        "data.dataloader_num_workers": 1,
        "actor_rollout_ref.model.path": f"{folder}/model",
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        f"{actor}.strategy": "fsdp2",
        f"{actor}.ppo_mini_batch_size": work.prompts,
        f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": work.micro_batch,
        f"{actor}.optim.lr": work.learning_rate,
        f"{rollout}.name": "sglang",
        f"{rollout}.n": work.samples,
        f"{rollout}.seed": work.seed,
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.gpu_memory_utilization": work.memory_fraction,
        f"{rollout}.max_num_seqs": work.samples_per_step,
        f"{rollout}.agent.num_workers": 2,
        "reward.num_workers": 1,
        "reward.custom_reward_function.path": f"{folder}/{REWARD}",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 2,
        "trainer.logger": "[console,file]",
        "trainer.n_gpus_per_node": 1,
        "trainer.val_before_train": False,
        "trainer.resume_mode": "disable",
        "trainer.total_training_steps": work.steps,
    } | {f"+{rollout}.engine_kwargs.sglang.{name}": value for name, value in engine_options(work).items()}


def asynchronous(work: Workload) -> dict[str, Any]:
    """Return the settings of the asynchronous mode: a step behind at most, and weights after each step."""
    return {
        "actor_rollout_ref.hybrid_engine": False,
        "actor_rollout_ref.rollout.n": work.samples,
        "async_training.concurrent_samples_per_replica": work.prompts,
        "async_training.require_batches": 1,
        "async_training.staleness_threshold": 1,
        "async_training.trigger_parameter_sync_step": 1,
        "data.gen_batch_size": 1,
        "data.return_raw_chat": True,
        "data.train_batch_size": 0,
        "ray_kwargs.ray_init.num_cpus": CORES,
        "rollout.n_gpus_per_node": 1,
        "rollout.nnodes": 1,
        "rollout.total_rollout_steps": work.prompts * (work.steps + 2),
        "trainer.nnodes": 1,
    }


def engine_options(work: Workload) -> dict[str, Any]:
    """Return SGLang's options as relaxd's engine gets them."""
    lines = (line.split(" = ", 1) for line in sglang_options(work.samples_per_step).splitlines())
    return {name: json.loads(value) for name, value in lines} | {"grammar_backend": "none"}


def launch(work: Workload, folder: Path, *, cpu: bool, extra: list[str]) -> Launch:
    """Return the run's command. Raises SystemExit without verl or a GPU, which its rollout needs."""
    if find_spec("verl") is None:
        raise SystemExit("verl is not installed: pip install verl==0.9.1")
    if cpu:
        raise SystemExit("verl's rollouts need a GPU: leave --cpu out")
    packages = folder / "verl-packages"
    flash_attention.provide(packages)
    if not any((Path(entry) / CROSS_ENTROPY).exists() for entry in sys.path):
        raise SystemExit(
            f"verl needs {CROSS_ENTROPY}, or computes log-probs a row at a time, 5 x slower: install flash-attn, "
            "or put the folder flash_attn/ops of its sources into PYTHONPATH"
        )
    (packages / "trl").mkdir(parents=True, exist_ok=True)
    (packages / "trl" / "__init__.py").write_text(NO_TRL)
    chosen = settings(work, folder) | (asynchronous(work) if work.gpus == 2 else {})
    words = [f"{name}={json.dumps(value).strip(chr(34))}" for name, value in chosen.items()]
    words += [f"+ray_kwargs.ray_init.{option}" for option in RAY] + ["hydra.run.dir=hydra", *extra]
    return Launch(
        [sys.executable, "-m", MODES[work.gpus], *words],
        folder,
        folder / "verl.jsonl",
        lambda line: LENGTH in line["data"],  # the asynchronous mode's rollouter writes lines without it
        {"VERL_FILE_LOGGER_PATH": f"{folder}/verl.jsonl", "RAY_USAGE_STATS_ENABLED": "0"},
    )


def step_facts(line: dict[str, Any], work: Workload) -> dict[str, Any]:
    """Return a step's answer tokens, mean reward and phases, and its gap, which is of probabilities."""
    data = line["data"]
    return {
        "tokens": work.samples_per_step * data[LENGTH],
        "reward": data["critic/score/mean"],
        "gap": data.get("rollout_corr/log_ppl_abs_diff"),
        "probability_gap": data.get(PROBABILITY_GAP),
        "phases": {name.removeprefix("timing_s/"): data[name] for name in data if name.startswith("timing_s/")},
    }
