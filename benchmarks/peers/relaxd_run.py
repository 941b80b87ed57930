"""relaxd: on one GPU an SGLang engine and the trainer take turns, strictly on-policy; on two a step may be one late."""

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.modes import sglang_options
from benchmarks.peers.watch import Launch
from benchmarks.peers.workload import MAX_PROMPT_TOKENS, REWARD, Workload

CONFIG = """\
[run]
steps = {work.steps}
seed = {work.seed}
folder = "{folder}/runs"
colocate = {colocate}

[model]
path = "{folder}/model"

[data]
source = "files"
path = "{folder}/prompts.jsonl"
answer_key = "reward_model.ground_truth"
max_prompt_tokens = {prompt}

[reward]
name = "{folder}/{reward}:compute_score"
workers = 2

[rollout]
engine = "{engine}"
dtype = "{dtype}"
samples_per_prompt = {work.samples}
max_new_tokens = {work.longest}
max_running_samples = {work.samples_per_step}
memory_fraction = {memory}

[rollout.sglang]
{options}

[algorithm]
name = "grpo"
drop_zero_variance = false

[trainer]
dtype = "{dtype}"
offload = {offload}
groups_per_step = {work.prompts}
micro_batch_tokens = {work.micro_batch}

[trainer.optimizer]
lr = {work.learning_rate}

[trainer.checkpoint]
every = 0

[weights]
transport = "{transport}"

[board]
max_staleness = {staleness}
"""


def launch(work: Workload, folder: Path, *, cpu: bool, extra: list[str]) -> Launch:
    """Write the run's configuration; return its command. `extra`: further options of `relaxd run`."""
    colocate = work.gpus == 1 and not cpu
    (folder / "run.toml").write_text(
        CONFIG.format(
            work=work,
            folder=folder,
            prompt=MAX_PROMPT_TOKENS,
            reward=REWARD,
            colocate=json.dumps(colocate),
            offload=json.dumps(not colocate),  # verl and TRL keep the trainer's state on the GPU by default, too
            engine="transformers" if cpu else "sglang",
            dtype="float32" if cpu else "bfloat16",
            memory=0 if cpu else work.memory_fraction,
            options="" if cpu else sglang_options(work.samples_per_step),
            transport="gloo" if cpu else "cuda_ipc" if colocate else "nccl",
            staleness=0 if work.gpus == 1 else 1,
        )
    )
    command = [sys.executable, "-m", "relaxd.cli", "run", "run.toml", "--run-id", "peers", *extra]
    steps = folder / "runs" / "peers" / "metrics.jsonl"
    return Launch(command, folder, steps, lambda line: "step_seconds" in line, {"CI": "1"})


def step_facts(line: dict[str, Any]) -> dict[str, Any]:
    """Return a step's answer tokens and mean reward, and its log-prob gap and phases where known."""
    phases = ("train_seconds", "wait_seconds", "sync_seconds", "switch_seconds")
    return {
        "tokens": line["samples"] * line["response_length_mean"],
        "reward": line["reward_mean"],
        "gap": line.get("logprob_difference"),
        "phases": {name.removesuffix("_seconds"): line[name] for name in phases if line.get(name)},
    }
