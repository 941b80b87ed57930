"""The model card of a trained model, from its run's folder: data, reward, algorithm, curve and evaluations."""

import os
import re
from pathlib import Path
from typing import Any

from relaxd.report.run_result import RunResult, table_of

CURVE = "curve.png"
"""File name of the picture of the run's curve, beside the card."""
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def model_card(result: RunResult, name: str, step: int) -> str:
    """Return README.md for a model, with the hub's metadata at its beginning.

    Paths of this machine are shortened to their last part; settings that may have secrets aren't in it.

    Args:
        result: the run.
        name: the model's name on the hub.
        step: the step after which the run had this model.
    """
    config = result.config
    facts = {label: _shown(value) for label, value in result.facts().items() if label != "started"}
    tags = ["relaxd", "reinforcement-learning"]
    metadata: list[str] = ["library_name: transformers", "pipeline_tag: text-generation"]
    training: dict[str, Any] = {"step of this model": step, "steps of the run": len(result.steps)}
    if config is not None:
        tags.append(config.algorithm.name)
        if _HUB_NAME.fullmatch(config.model.path) and not Path(config.model.path).exists():
            metadata.append(f"base_model: {config.model.path}")
        training |= {
            "groups in a step": config.trainer.groups_per_step,
            "answers to a prompt": config.rollout.samples_per_prompt,
            "temperature": config.rollout.temperature,
            "maximum tokens of an answer": config.rollout.max_new_tokens,
            "learning rate": config.trainer.optimizer.lr,
            "seed": config.run.seed,
        }
    parts = [
        "\n".join(["---", *metadata, "tags:", *(f"- {tag}" for tag in tags), "---"]),
        f"# {name.rpartition('/')[2]}",
        f"This model was trained by reinforcement learning with relaxd, in the run `{result.run_id}`.",
        _table(["", ""], [[label, str(value)] for label, value in (facts | training).items()]),
    ]
    if result.steps:
        rewards = [line["reward_mean"] for line in result.steps]
        parts += [
            "## Training",
            f"The mean reward of a step went from {rewards[0]:.3f} to {rewards[-1]:.3f}.",
            f"![Reward over the steps]({CURVE})",
        ]
    if rows := result.set_rows:
        titles, cells = table_of(rows)
        parts += ["## Evaluation", _table(titles, cells), "Step 0 is the model before training."]
    return "\n\n".join(parts) + "\n"


def _shown(value: str) -> str:
    """Shorten the absolute paths in a text."""
    return " ".join(os.path.basename(word.rstrip("/")) if word.startswith("/") else word for word in value.split(" "))


def _table(titles: list[str], rows: list[list[str]]) -> str:
    cells = [titles, ["---"] * len(titles), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)
