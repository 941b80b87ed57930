"""The sets that a run evaluates on, with all defaults resolved."""

import difflib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from relaxd.config import AgentConfig, RewardConfig, RunConfig
from relaxd.config.evaluation import EvalSet
from relaxd.data.sources.evaluation_sets import BENCHMARKS
from relaxd.run_folder import HELD_OUT
from relaxd.v1.sample_pb2 import SamplingParams

SHARED = ("workers", "timeout_seconds", "environment", "max_in_flight", "outage_seconds")
"""Settings of [reward] that also hold for the rewards of evaluation sets."""
TRAINING = "training"
"""Name of the evaluation set that consists of training prompts (`relaxd eval --training`)."""


@dataclass(frozen=True, kw_only=True)
class ResolvedSet:
    """An evaluation set: prompts, with the settings for answering and scoring them."""

    name: str
    prompts: int
    """Maximum number of prompts to evaluate; 0 means all of the set."""
    samples_per_prompt: int
    sizes: tuple[int, ...]
    """Values of k for which pass@k and maj@k are estimated."""
    temperature: float
    """Sampling temperature; 0: always the likeliest token."""
    top_p: float
    top_k: int
    """Number of the likeliest tokens to sample from; 0 means all tokens."""
    max_new_tokens: int
    min_new_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    seed: int
    """Seed of the run (run.seed), from which the seeds of prompts follow."""
    reward: RewardConfig | None = None
    """Reward that scores the set's answers; None means the run's reward."""
    right_from: float = 1.0
    agent: AgentConfig | None = None
    """Settings of the set's conversations with an environment; None if answers are single replies."""

    def prompt_seed(self, index: int) -> int:
        """Return the seed of the answers to a prompt. The seed depends only on the run's seed, the set's name and the
        prompt's index."""
        digest = hashlib.blake2b(f"{self.seed}/{self.name}/{index}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    def sampling(self, index: int) -> SamplingParams:
        """Return the sampling parameters, with seed, of the answers to a prompt."""
        return SamplingParams(**self.sampling_settings, seed=self.prompt_seed(index))

    @property
    def sampling_settings(self) -> dict[str, Any]:
        """Sampling parameters of all answers, without the seed."""
        names = ("max_new_tokens", "temperature", "top_p", "top_k", "stop", "stop_token_ids", "min_new_tokens")
        return {name: getattr(self, name) for name in names}

    @property
    def prefix(self) -> str:
        """Prefix of the names of this set's metrics."""
        return "eval_" if self.name == HELD_OUT else f"eval/{self.name}/"


def sets_of(config: RunConfig) -> list[ResolvedSet]:
    """Return the sets that a run evaluates on: the held-out prompts first."""
    own, rollout = config.eval, config.rollout
    agent = config.agent if config.agent.is_there else None
    longest = own.max_new_tokens or rollout.max_new_tokens
    greedy_set = replace(
        training_set(config, own.prompts),
        name=HELD_OUT,
        samples_per_prompt=1,
        sizes=(1,),
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        max_new_tokens=longest,
        agent=agent,
    )
    found = [greedy_set] if own.prompts else []
    for one in own.sets:
        greedy = one.samples_per_prompt == 1
        found.append(
            ResolvedSet(
                name=one.name,
                prompts=one.prompts,
                samples_per_prompt=one.samples_per_prompt,
                sizes=one.sizes,
                temperature=(0.0 if greedy else rollout.temperature) if one.temperature is None else one.temperature,
                top_p=one.top_p or rollout.top_p,
                top_k=rollout.top_k if one.top_k is None else one.top_k,
                max_new_tokens=one.max_new_tokens or longest,
                min_new_tokens=rollout.min_new_tokens if one.min_new_tokens is None else one.min_new_tokens,
                stop=rollout.stop if one.stop is None else one.stop,
                stop_token_ids=rollout.stop_token_ids if one.stop_token_ids is None else one.stop_token_ids,
                seed=config.run.seed,
                reward=_reward_of(one, config.reward),
                right_from=one.right_from,
                agent=agent and _agent_of(one, agent),
            )
        )
    return found


def training_set(config: RunConfig, prompts: int) -> ResolvedSet:
    """Return an evaluation set of the first `prompts` training prompts, with the run's sampling settings."""
    rollout = config.rollout
    return ResolvedSet(
        name=TRAINING,
        prompts=prompts,
        samples_per_prompt=rollout.samples_per_prompt,
        sizes=tuple(sorted({1, rollout.samples_per_prompt})),
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_new_tokens=rollout.max_new_tokens,
        min_new_tokens=rollout.min_new_tokens,
        stop=rollout.stop,
        stop_token_ids=rollout.stop_token_ids,
        seed=config.run.seed,
    )


def _agent_of(one: EvalSet, runs: AgentConfig) -> AgentConfig:
    """Return the run's settings of conversations, with the environment that an evaluation set names, if it names
    one."""
    if not one.environment and one.environment_settings is None:
        return runs
    own = {
        "environment": one.environment or runs.environment,
        "command": (),
        "function": "",
        "settings": one.environment_settings or {},
    }
    return runs.model_copy(update=own)


def _reward_of(one: EvalSet, runs: RewardConfig) -> RewardConfig | None:
    """Return the reward that an evaluation set names, with the run's workers and limits; None if it names none."""
    name = one.reward or ("reasoning_gym" if one.task else "")
    if not name and one.benchmark in BENCHMARKS:
        name = BENCHMARKS[one.benchmark].reward
    if one.reward_address:
        own = RewardConfig(address=one.reward_address, address_token=one.reward_address_token)
    elif name:
        own = RewardConfig(name=name, settings=one.reward_settings, key=one.reward_key)
    else:
        return None
    return own.model_copy(update={limit: getattr(runs, limit) for limit in SHARED})


def unknown_set(name: str, known: Sequence[str]) -> str:
    """Return the error message for an unknown evaluation set, with a similar name or the known names."""
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known) or 'none'}"
    return f"there is no evaluation set {name!r}; {hint}"
