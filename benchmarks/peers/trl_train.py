"""TRL's GRPOTrainer on the workload: `python -m benchmarks.peers.trl_train FOLDER JSON` with a Workload's fields."""

import json
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.workload import REWARD, Workload


def train(folder: Path, work: Workload, *, generation: str, cpu: bool, dtype: str, batch: int) -> None:
    """Train; a line of trl.jsonl after each step has TRL's own metrics.

    `generation`: "continuous" is transformers' continuous batching, "plain" its `generate`, "static" the same with a
    static cache. `dtype`: of the weights. `batch`: samples of a forward.
    """
    import torch
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    score: Any = runpy.run_path(str(folder / REWARD))["compute_score"]

    def reward(completions: list[Any], reward_model: list[dict[str, str]], **rest: Any) -> list[float]:
        pairs = zip(completions, reward_model, strict=True)
        return [score(work.task, answer[0]["content"], known["ground_truth"]) for answer, known in pairs]

    class Steps(TrainerCallback):
        """Writes each step's metrics."""

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
            if "loss" in (logs or {}):
                with (folder / "trl.jsonl").open("a") as file:
                    file.write(json.dumps({"step": state.global_step, "at": time.time()} | logs) + "\n")

    generations = {
        "plain": {},
        "static": {"cache_implementation": "static"},
        "continuous": {
            "use_transformers_continuous_batching": True,
            "transformers_continuous_batching_config": {
                "max_memory_percent": min(work.memory_fraction, 0.25),  # the rest is for its padded batches
                "max_blocks_per_request": 0,
            },
        },
    }
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=work.samples_per_step // batch,
        num_generations=work.samples,
        max_completion_length=work.longest,
        max_steps=work.steps,
        learning_rate=work.learning_rate,
        lr_scheduler_type="constant",
        seed=work.seed,
        beta=0.0,
        bf16=not cpu,
        use_cpu=cpu,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        **generations[generation],
    )
    model = AutoModelForCausalLM.from_pretrained(
        str(folder / "model"),
        dtype=getattr(torch, dtype),
        attn_implementation="sdpa" if dtype == "float32" else "flash_attention_2",
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=load_dataset("json", data_files=str(folder / "prompts.jsonl"))["train"].select_columns(
            ["prompt", "reward_model"]
        ),
        processing_class=AutoTokenizer.from_pretrained(str(folder / "model")),
        callbacks=[Steps()],
    )
    trainer.train()


if __name__ == "__main__":
    options = json.loads(sys.argv[2])
    train(Path(sys.argv[1]), Workload(**options.pop("work")), **options)
