"""Configuration of a rehearsal: that of the run, with scripted engines and trainer, and scaled speeds and sizes.

Time is scaled through speeds: everything that is assumed to take time becomes `time_scale` times as fast. Payloads are
scaled through lengths: tokens per answer and the engines' speed are divided by `payload_scale`, so that answers take as
long as before but store fewer bytes.
"""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

from relaxd.board.sizes import EXPECTED_SHARE, media_bytes, worst_bytes
from relaxd.config import AgentConfig, RehearsalConfig, RunConfig
from relaxd.config.data import DataSource
from relaxd.config.operation import EXPERTS
from relaxd.config.role_settings import AutoscaleConfig
from relaxd.engines import SCRIPTED
from relaxd.models.shape import expert_dtype

QUANTILES = 1000
"""Number of quantiles by which the mean of a distribution, such as of answers' lengths, is computed."""
REWARD = "relaxd.tools.rehearsal.stand_ins:scripted"
ENVIRONMENT = "relaxd.tools.rehearsal.stand_ins:StandInEnvironment"
MANY_STEPS = 1_000_000
STEPS_IN_REDIS = 3
"""Maximum number of steps whose groups are in Redis at once: being generated, waiting, being trained."""
LONG_TAIL = 1.5
"""Estimated ratio of answers' mean length to their median length, for a log-normal spread of 0.9."""
MIN_TOKENS = 64
"""Minimum to which a rehearsal scales down the maximum length of answers, in tokens. In shorter answers' payloads,
prompts and headers would dominate."""
LEAST_WINDOW_SECONDS = 5.0
"""Minimum to which a rehearsal shortens the autoscaler's windows, in seconds. The autoscaler checks once a second at
any time scale."""


@dataclass(frozen=True)
class Scale:
    """Numbers of replicas in a rehearsal, and the divisors of its times and payloads."""

    rollout: int
    """Number of rollout replicas."""
    time: float
    """Divisor by which all assumed times are shortened."""
    payload: int
    """Divisor by which answers are shortened, and with them their payloads."""
    ranks: int = 1
    """Number of the trainer's ranks, all data-parallel."""
    agents: int = 0
    """Number of agent replicas; 0 for runs without conversations."""


def expert_bytes(config: RunConfig) -> int:
    """Return the bytes of a token's routed experts; 0 if the run doesn't return them."""
    return (
        expert_dtype(EXPERTS).itemsize * math.prod(config.rehearsal.experts)
        if config.rollout.return_routed_experts
        else 0
    )


def held_bytes(config: RunConfig) -> float:
    """Return the maximum bytes of groups that Redis holds at the same time, without scaling of payloads.

    The media of a prompt count with EXPECTED_SHARE of their maximum, those of a conversation as the stand-in
    environment shows them.
    """
    most = config.rollout.max_new_tokens
    tokens = LONG_TAIL * median_tokens(config)
    if config.agent.is_there:
        tokens = mean_turns(config) * (tokens + config.rehearsal.observation_tokens)
    share = min(1.0, tokens / most)
    group = worst_bytes(config, 0, expert_bytes=expert_bytes(config)) * share
    media = EXPECTED_SHARE * media_bytes(config, config.data.max_prompt_tokens)
    if config.agent.is_there:
        answers = config.rollout.samples_per_prompt * (mean_turns(config) - 1)
        media += media_bytes(config, round(answers * config.rehearsal.observation_tokens))
    return STEPS_IN_REDIS * config.trainer.groups_per_step * (group + media)


def payload_scale(config: RunConfig, memory_bytes: int) -> int:
    """Return the power of two by which payloads must be divided so that the groups fit into `memory_bytes`.

    MIN_TOKENS limits it. For runs with media it is 1: only answers can be shortened, but the report would multiply the
    bytes of media, too.
    """
    if config.has_media:
        return 1
    needed = held_bytes(config) / memory_bytes
    return min(1 << max(0, math.ceil(math.log2(needed))), max(1, config.rollout.max_new_tokens // MIN_TOKENS))


def admitted_groups(config: RunConfig) -> int:
    """Return the maximum number of groups that the gate admits at the same time."""
    return int(config.trainer.groups_per_step * (1 + config.board.max_staleness) * config.board.oversample)


def median_tokens(config: RunConfig) -> int:
    """Return the median length of an answer, in tokens; in conversations, of each message that the model writes."""
    eighth = config.rollout.max_new_tokens // 8
    return config.rehearsal.median_tokens or max(1, eighth // (config.rehearsal.turns if config.agent.is_there else 1))


def mean_of(median: float, most: float, spread: float, of_longest: int = 1) -> float:
    """Return the mean of a log-normal distribution whose values are limited to `most`.

    With `of_longest` above 1: the mean of the largest of that number of values.
    """
    normal = NormalDist()
    shares = ((number + 0.5) / QUANTILES for number in range(QUANTILES))
    quantiles = (math.exp(spread * normal.inv_cdf(share ** (1 / of_longest))) for share in shares)
    return statistics.fmean(min(median * quantile, most) for quantile in quantiles)


def mean_turns(config: RunConfig) -> float:
    """Return the mean number of messages that the model writes per sample; 1 without conversations."""
    own = config.rehearsal
    return mean_of(own.turns, config.agent.max_turns, own.spread) if config.agent.is_there else 1.0


def mean_tokens(config: RunConfig, of_longest: int = 1) -> float:
    """Return the mean number of tokens that the model generates per sample, or for the longest of `of_longest`
    samples."""
    most, median = config.rollout.max_new_tokens, median_tokens(config) * mean_turns(config)
    return mean_of(median, most, config.rehearsal.spread, of_longest)


def least_step_seconds(config: RunConfig, rollout: int, agents: int = 0) -> float:
    """Return the seconds that a step takes at least on average, with these numbers of rollout and agent replicas.

    The slowest of three limits determines the time: generating the step's tokens in the busy engines, training on them,
    and the number of groups in progress, which the gate and the agents limit. A group takes as long as its longest
    answer.
    """
    own, groups, samples = config.rehearsal, config.trainer.groups_per_step, config.rollout.samples_per_prompt
    tokens, admitted = groups * samples * mean_tokens(config), float(admitted_groups(config))
    if agents:
        admitted = min(admitted, agents * config.agent.max_sessions / samples)
    return max(
        tokens / (min(rollout, admitted) * own.tokens_per_second),
        tokens / own.train_tokens_per_second + own.update_seconds,
        groups
        / admitted
        * (mean_tokens(config, of_longest=samples) / own.sample_tokens_per_second + _tool_seconds(config)),
    )


def _tool_seconds(config: RunConfig) -> float:
    """Return the mean seconds that a conversation waits for its environment; 0 without conversations."""
    own = config.rehearsal
    return mean_turns(config) * mean_of(own.tool_seconds, math.inf, own.spread) if config.agent.is_there else 0.0


def obstacle(config: RunConfig) -> str:
    """Return why a run can't be rehearsed with this configuration; "" if it can."""
    if config.run.colocate:
        return "run.colocate is true: trainer and engines that take turns can't be rehearsed"
    if "reference" in config.frozen_roles("service"):
        return 'roles.reference.placement is "service": it can\'t be rehearsed; set "trainer" to rehearse the rest'
    if "teacher" in config.frozen_roles():
        return "roles.teacher.model is set: a teacher can't be rehearsed; leave distillation out to rehearse the rest"
    if config.roles.judge.is_there:
        return "roles.judge.model is set: a judge can't be rehearsed; leave roles.judge out to rehearse the rest"
    if config.algorithm.needs_critic:
        return f'algorithm.name is "{config.algorithm.name}": a critic can\'t be rehearsed; "grpo" rehearses the rest'
    if problem := config.media_problem:
        return " ".join(problem)
    routed = {
        "rollout.return_routed_experts is true": config.rollout.return_routed_experts,
        'trainer.routing_replay is "trainer"': config.trainer.routing_replay == "trainer",
    }
    if any(routed.values()) and not math.prod(config.rehearsal.experts):
        what = next(name for name, holds in routed.items() if holds)
        return f"{what}: say how many with rehearsal.moe_layers and experts_per_token"
    return ""


def rehearsed(config: RunConfig, scale: Scale, *, model: Path, folder: Path) -> RunConfig:
    """Return the configuration of a run's rehearsal.

    Args:
        config: the run's configuration.
        scale: numbers of replicas, and divisors of times and payloads.
        model: folder with the tokenizer.
        folder: folder for the rehearsal's run.
    """
    own = config.rehearsal
    faster, shorter = scale.time, scale.payload
    new_tokens = max(1, config.rollout.max_new_tokens // shorter)
    least = min(config.rollout.min_new_tokens, new_tokens)
    sequence = config.data.max_prompt_tokens + new_tokens
    rehearsal = RehearsalConfig(
        **{
            **own.model_dump(),
            "median_tokens": max(1, median_tokens(config) // shorter),
            "tool_seconds": own.tool_seconds / faster,
            "observation_tokens": max(1, own.observation_tokens // shorter),
            "tokens_per_second": own.tokens_per_second * faster / shorter,
            "sample_tokens_per_second": own.sample_tokens_per_second * faster / shorter,
            "train_tokens_per_second": own.train_tokens_per_second * faster / shorter,
            "update_seconds": own.update_seconds / faster,
            "sync_seconds": own.sync_seconds / faster,
            "reward_seconds": own.reward_seconds / faster,
        }
    )
    reward = {"success": own.success, "seconds": rehearsal.reward_seconds}
    alone = {"tensor_parallel": 1, "pipeline_parallel": 1, "context_parallel": 1, "expert_parallel": 1}
    conversations = {}
    if config.agent.is_there:
        conversations["agent"] = _with_stand_in(
            config.agent, config.data.media_keys, rehearsal, shorter, is_byte=model.name == "stand-in"
        )
    return _updated(
        config,
        **conversations,
        run={"steps": MANY_STEPS, "folder": folder},
        model={"path": str(model), "chat_template": None if model.name == "stand-in" else config.model.chat_template},
        reward={
            "name": REWARD,
            "settings": reward,
            "terms": (),
            "key": "",
            "choose_by": "",
            "choices": {},
            "environment": (),
            "address": "",
            "cache_samples": 0,
        },
        rollout={
            "engine": SCRIPTED,
            "max_new_tokens": new_tokens,
            "min_new_tokens": least,
            "threads": 1,
        },
        trainer={
            **alone,
            "pipeline_layers": (),
            "pipeline_chunks": 1,
            "ranks": scale.ranks,
            "hosts": 1,
            "threads": 1,
            "micro_batch_tokens": max(sequence, config.micro_batch_tokens // shorter),
            "checkpoint": config.trainer.checkpoint.model_copy(update={"every": 0}),
        },
        weights={"transport": "gloo"},
        eval={"prompts": 0, "interval": 0, "sets": (), "before": False, "after": False},
        data={"sources": tuple(_shortened(one, new_tokens, least) for one in config.data.sources)},
        roles={"reference": config.roles.reference.model_copy(update={"model": ""})},
        board={"high_water_bytes": config.board.high_water_bytes // shorter, "data_urls": ()},
        rehearsal=rehearsal.model_dump(),
        autoscale=_faster(config.autoscale, faster),
    )


def _faster(autoscale: AutoscaleConfig, faster: float) -> dict[str, float]:
    """Return the autoscaler's windows and cooldowns for a rehearsal that is `faster` times as fast as the run."""
    windows = {"out_seconds": autoscale.out_seconds, "in_seconds": autoscale.in_seconds}
    return {
        **{name: min(value, max(LEAST_WINDOW_SECONDS, value / faster)) for name, value in windows.items()},
        "out_cooldown_seconds": autoscale.out_cooldown_seconds / faster,
        "in_cooldown_seconds": autoscale.in_cooldown_seconds / faster,
    }


def _with_stand_in(
    agent: AgentConfig, prompt_media: Iterable[str], rehearsal: RehearsalConfig, shorter: int, *, is_byte: bool
) -> dict[str, Any]:
    """Return the rehearsal's section [agent]: the run's limits, and an environment that only takes the assumed time.

    The environment shows media if the run's may: the first kind in agent.media, or else of the prompts' media.
    """
    settings = {
        "turns": rehearsal.turns,
        "seconds": rehearsal.tool_seconds,
        "spread": rehearsal.spread,
        "words": rehearsal.observation_tokens,
        "word": "a" if is_byte else " a",
        "shows": next(iter((*agent.media, *prompt_media)), ""),
    }
    alike = ("media", "max_turns", "call_seconds", "conversation_seconds", "on_failure", "max_retries", "max_sessions")
    kept = {name: getattr(agent, name) for name in alike}
    kept["turn_tokens"] = agent.turn_tokens and max(1, agent.turn_tokens // shorter)
    return AgentConfig(environment=ENVIRONMENT, settings=settings, **kept).model_dump()


def _shortened(source: DataSource, most: int, least: int) -> DataSource:
    """Return a data source whose own limit of answers' lengths, if any, is changed to between `least` and `most`
    tokens."""
    limit = source.max_new_tokens
    return source.model_copy(update={"max_new_tokens": limit and max(least, 1, min(limit, most))})


def _updated(config: RunConfig, **sections: dict[str, Any]) -> RunConfig:
    """Return a copy of a configuration with changed sections. The copy isn't validated; the coordinator does that when
    the run starts."""
    changed = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return config.model_copy(update=changed)
