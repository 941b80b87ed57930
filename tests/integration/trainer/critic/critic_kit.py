"""Runs of PPO with a critic, and a plain torch loop that trains the same."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from relaxd.board import Board
from relaxd.config import RunConfig
from relaxd.run_folder import critic_folder
from tests.integration.trainer.service_kit import Feeder, several_updates
from tests.integration.trainer.training_worlds import RunJob

LENGTHS = (6, 9, 4, 11, 7, 5, 10, 8)
"""Tokens of the answers of each group: of two steps of four groups."""
RATES = {1: (1.5e-2, 1e-2), 2: (1e-2, 1e-2)}
"""Learning rates of policy and critic in each step: linear from 2e-2 to 1e-2, and constant."""
GAMMA, LAMBDA, VALUE_CLIP = 0.97, 0.9, 0.1
COMPARED = (
    *("loss", "grad_norm", "ratio", "clip_fraction_epoch_2", "value_loss", "value_grad_norm", "value_clip_fraction"),
    *("explained_variance", "value_mean", "return_mean"),
)


def config_of(model: Path, critic: dict[str, Any] | None = None, **trainer: Any) -> RunConfig:
    optimizer = {"lr": 1e-2, "clip_grad": 0.5, "epsilon": 1e-3, "weight_decay": 0.1}
    ppo = {"name": "ppo", "old_logprobs": "current", "gamma": GAMMA, "gae_lambda": LAMBDA, "value_clip": VALUE_CLIP}
    return several_updates(model, ppo, {"critic": {"optimizer": optimizer, **(critic or {})}}, **trainer)


def prepare_run(redis_url: str, number: int, config: RunConfig, folder: Path, **of_group: dict[str, Any]) -> RunJob:
    """A run whose groups all wait for it, in a database of its own; `of_group` changes some groups' columns.

    Every token has a reward: what the advantage stage writes for an algorithm with a critic.
    """
    folder.mkdir(parents=True)
    url = redis_url.removesuffix("/0") + f"/{number}"
    feeder = Feeder(url, config)
    for index, length in enumerate(LENGTHS[: 4 * config.run.steps]):
        feeder.feed(1, 0, **{"length": length, "advantage": 0.2 * index, **of_group.get(f"g{index + 1}", {})})
    feeder.board.close()
    return RunJob(config, url, folder)


class PlainLoop:
    """PPO's loop for policy and critic with transformers and torch, in float64."""

    def __init__(self, config: RunConfig) -> None:
        def load() -> Any:
            return transformers.AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float64)

        self.policy, self.critic = load(), load().model
        self.head = torch.nn.Parameter(torch.zeros(self.policy.config.hidden_size, dtype=torch.float64))
        self.policy_optimizer = adamw(self.policy.named_parameters(), config.trainer.optimizer)
        critic = [*self.critic.named_parameters(), ("head", self.head)]
        self.critic_optimizer = adamw(critic, config.roles.critic.optimizer)
        self.critics: dict[int, Any] = {}
        """The critic and its head after each step."""

    def of_answers(self, group: dict[str, Any], critic_step: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs of a group's answers, one after the other, and the values of the tokens before each token.

        The values are those of the critic as it is, or as it was after a step.
        """
        logprobs, values, begin = [], [], 0
        critic, head = (self.critic, self.head) if critic_step is None else self.critics[critic_step]
        prompt = torch.from_numpy(group["prompt_tokens"].astype(np.int64))
        for length in group["lengths"].tolist():
            answer = torch.from_numpy(group["tokens"][begin : begin + length].astype(np.int64))
            begin += length
            row, predicting = torch.cat([prompt, answer])[None], slice(len(prompt) - 1, -1)
            logits = self.policy(row).logits[0, predicting]
            logprobs.append(logits.log_softmax(-1).gather(-1, answer[:, None])[:, 0])
            values.append(critic(row).last_hidden_state[0, predicting] @ head)
        return torch.cat(logprobs), torch.cat(values)

    def step(
        self, number: int, groups: dict[str, dict[str, Any]], rewards: dict[str, Any], parts: list[list[str]]
    ) -> dict[str, list[float]]:
        """One step of the run, from the rewards of tokens. Returns the numbers of each update."""
        for optimizer, rate in zip((self.policy_optimizer, self.critic_optimizer), RATES[number], strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate
        self.critics[number - 1] = copy.deepcopy((self.critic, self.head))
        with torch.no_grad():
            # A critic service says which critic gave the values.
            of_step = {name: group.get("critic_state", {"step": number - 1})["step"] for name, group in groups.items()}
            old = {name: self.of_answers(group, of_step[name]) for name, group in groups.items()}
        advantages, returns = {}, {}
        for name, group in groups.items():
            advantages[name], returns[name] = generalized(rewards[name], old[name][1], group["lengths"].tolist())
        everything = torch.cat(list(advantages.values()))
        mean, std = everything.mean(), everything.std(correction=0)
        for name, group in groups.items():
            np.testing.assert_allclose(group["values"], old[name][1].numpy(), atol=5e-5)
            np.testing.assert_allclose(group["returns"], returns[name].numpy(), atol=5e-4)
            np.testing.assert_allclose(group["advantages"], advantages[name].numpy(), atol=5e-4)
        seen: dict[str, list[float]] = {name: [] for name in COMPARED[:7] if "epoch" not in name}
        seen |= {"advantage_mean": [float(mean)], "advantage_std": [float(std)]}
        for _ in range(2):
            for part in parts:
                terms, ratios, value_terms, clipped, value_clipped = [], [], [], [], []
                for name in part:
                    logprobs, values = self.of_answers(groups[name])
                    ratio, advantage = (logprobs - old[name][0]).exp(), (advantages[name] - mean) / std
                    plain, limited = ratio * advantage, ratio.clamp(0.8, 1.2) * advantage
                    terms.append(-torch.minimum(plain, limited))
                    change = values - old[name][1]
                    near = old[name][1] + change.clamp(-VALUE_CLIP, VALUE_CLIP)
                    goal = returns[name]
                    value_terms.append(torch.maximum((values - goal) ** 2, (near - goal) ** 2) / 2)
                    ratios.append(ratio.detach())
                    clipped.append((limited < plain).double())
                    value_clipped.append((change.abs() > VALUE_CLIP).double())
                loss, value_loss = torch.cat(terms).mean(), torch.cat(value_terms).mean()
                self.policy_optimizer.zero_grad()
                self.critic_optimizer.zero_grad()
                loss.backward()
                value_loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
                value_norm = torch.nn.utils.clip_grad_norm_([*self.critic.parameters(), self.head], 0.5)
                self.policy_optimizer.step()
                self.critic_optimizer.step()
                seen["loss"].append(float(loss.detach()))
                seen["grad_norm"].append(float(norm))
                seen["ratio"].append(float(torch.cat(ratios).mean()))
                seen["value_loss"].append(float(value_loss.detach()))
                seen["value_grad_norm"].append(float(value_norm))
                seen["value_clip_fraction"].append(float(torch.cat(value_clipped).mean()))
        return seen


def adamw(named: Any, settings: Any) -> torch.optim.Optimizer:
    """AdamW without decay for norms."""
    named = list(named)
    return torch.optim.AdamW(
        [
            {"params": [p for name, p in named if "norm" not in name], "weight_decay": settings.weight_decay},
            {"params": [p for name, p in named if "norm" in name], "weight_decay": 0.0},
        ],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
    )


def generalized(rewards: np.ndarray, values: torch.Tensor, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns, from the last token of each answer to the first."""
    advantages, end = torch.zeros_like(values), 0
    for length in lengths:
        begin, end = end, end + length
        following = value = 0.0
        for t in reversed(range(begin, end)):
            following = float(rewards[t]) + GAMMA * value - float(values[t]) + GAMMA * LAMBDA * following
            value = float(values[t])
            advantages[t] = following
    return advantages, advantages + values


def rewards_of(config: RunConfig, names: Any) -> dict[str, np.ndarray]:
    """Return the rewards that `prepare_run` gives each token of the groups."""
    samples = config.rollout.samples_per_prompt
    largest = {f"g{i + 1}": (0.2 * i, length) for i, length in enumerate(LENGTHS)}
    return {n: np.repeat(np.linspace(-largest[n][0], largest[n][0], samples), largest[n][1]) for n in names}


def critic_rank(config: RunConfig, run_folder: Path, board: Board) -> Any:
    """The only rank of a critic, in this process."""
    from services.trainer.critic_rank import CriticLearner, CriticRank
    from services.trainer.loop.commanded_rank import CheckpointPart
    from services.trainer.megatron.channels import RankChannel

    learner = CriticLearner(config)
    return CriticRank(
        channel=RankChannel(60.0, learner.world.disk),
        learner=learner,
        checkpoint=CheckpointPart(learner),
        board=board,
        run_folder=critic_folder(run_folder),
        steps_of=run_folder,
    )
