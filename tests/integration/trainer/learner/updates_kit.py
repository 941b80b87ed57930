"""Steps of several updates, and a plain torch loop that trains the same."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from relaxd.config import RunConfig
from tests.integration.trainer.service_kit import Feeder, several_updates
from tests.integration.trainer.training_worlds import RunJob

NORMALISED = {"name": "reinforce_plus_plus"}
"""An algorithm whose advantages are normalised over the step."""
LENGTHS = (6, 9, 4, 11, 7, 5, 10, 8)
"""Tokens of the answers of each group: of two steps of four groups."""
RATES = {1: 1.5e-2, 2: 1e-2}
"""Learning rate of each step: linear from 2e-2 to 1e-2."""


def config_of(model: Path, algorithm: dict[str, Any] | None = None, **trainer: Any) -> RunConfig:
    return several_updates(model, {"old_logprobs": "current", **(algorithm or {})}, **trainer)


def prepare_run(redis_url: str, number: int, config: RunConfig, folder: Path, **of_group: dict[str, Any]) -> RunJob:
    """A run whose groups all wait for it, in a database of its own; `of_group` changes some groups' columns."""
    folder.mkdir(parents=True)
    url = redis_url.removesuffix("/0") + f"/{number}"
    feeder = Feeder(url, config)
    for index, length in enumerate(LENGTHS[: 4 * config.run.steps]):
        feeder.feed(1, 0, **{"length": length, **of_group.get(f"g{index + 1}", {})})
    feeder.board.close()
    return RunJob(config, url, folder)


def prepare_rewarded_run(
    redis_url: str, number: int, config: RunConfig, folder: Path, **of_group: dict[str, Any]
) -> RunJob:
    """A run whose groups all wait for it, one more than it trains on, in a database of its own."""
    folder.mkdir(parents=True)
    url = redis_url.removesuffix("/0") + f"/{number}"
    feeder = Feeder(url, with_steps(config, config.run.steps + 1))  # or the board had no room for one more
    for index, length in enumerate((*LENGTHS[: 4 * config.run.steps], 6)):
        feeder.feed(
            1, 0, **{"length": length, "rewards": [0.0, 1.0 + 0.1 * index], **of_group.get(f"g{index + 1}", {})}
        )
    feeder.board.close()
    return RunJob(config, url, folder)


def with_steps(config: RunConfig, steps: int) -> RunConfig:
    return config.model_copy(update={"run": config.run.model_copy(update={"steps": steps})})


class PlainLoop:
    """PPO's loop over mini-batches and epochs with transformers and torch, in float64."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.model = transformers.AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float64)
        named = list(self.model.named_parameters())
        settings = config.trainer.optimizer
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for name, p in named if "norm" not in name], "weight_decay": settings.weight_decay},
                {"params": [p for name, p in named if "norm" in name], "weight_decay": 0.0},
            ],
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
        )

    def logprobs(self, group: dict[str, Any]) -> torch.Tensor:
        """Log-probs of a group's answers, one after the other."""
        found, begin = [], 0
        prompt = torch.from_numpy(group["prompt_tokens"].astype(np.int64))
        for length in group["lengths"].tolist():
            answer = torch.from_numpy(group["tokens"][begin : begin + length].astype(np.int64))
            begin += length
            logits = self.model(torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]
            found.append(logits.log_softmax(-1).gather(-1, answer[:, None])[:, 0])
        return torch.cat(found)

    def step(self, number: int, groups: dict[str, dict[str, Any]], parts: list[list[str]]) -> dict[str, list[float]]:
        """One step of the run. Returns the loss, the gradient norm and the clip fraction of each update."""
        for group in self.optimizer.param_groups:
            group["lr"] = RATES[number]
        mean, std = normalisation(groups) if self.config.algorithm.name == NORMALISED["name"] else (0.0, 1.0)
        with torch.no_grad():
            old = {name: self.logprobs(group) for name, group in groups.items()}
        seen: dict[str, list[float]] = {"loss": [], "grad_norm": [], "clip_fraction": []}
        for _ in range(self.config.trainer.epochs):
            for part in parts:
                terms, clipped = [], []
                for name in part:
                    ratio = (self.logprobs(groups[name]) - old[name]).exp()
                    advantage = (torch.from_numpy(groups[name]["advantages"]).double() - mean) / std
                    trained = torch.from_numpy(groups[name]["loss_mask"] != 0)
                    plain, limited = ratio * advantage, ratio.clamp(0.8, 1.2) * advantage
                    terms.append(-torch.minimum(plain, limited)[trained])
                    clipped.append((limited < plain)[trained].double())
                loss = torch.cat(terms).mean()
                self.optimizer.zero_grad()
                loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                seen["loss"].append(float(loss.detach()))
                seen["grad_norm"].append(float(norm))
                seen["clip_fraction"].append(float(torch.cat(clipped).mean()))
        return seen


def normalisation(groups: dict[str, dict[str, Any]]) -> tuple[float, float]:
    """Mean and standard deviation of the advantages of all trained tokens of a step."""
    pairs = [zip(group["advantages"], group["loss_mask"], strict=True) for group in groups.values()]
    values = [float(advantage) for one in pairs for advantage, trained in one if trained]
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
