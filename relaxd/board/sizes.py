"""How large groups can become, and whether a run's steps fit into Redis."""

from dataclasses import dataclass

from relaxd.board.admission import megabytes
from relaxd.config import RunConfig

TOKEN_BYTES = 32
"""Most bytes of a token: tokens 4, loss_mask 1, rollout_logprobs 4, versions 8, advantages 4, the rest for its text."""
GENERATED_BYTES = 17
"""Bytes of a token in the arrays that the rollout stage writes: what every token takes for certain."""
GROUP_BYTES = 4096
"""What a group needs besides its tokens."""
EXPECTED_SHARE = 0.25
"""A step must fit into Redis if answers have this share of rollout.max_new_tokens: on few tasks they are shorter."""


@dataclass(frozen=True)
class RedisMemory:
    """What a Redis has room for, in bytes."""

    used: int
    most: int
    """It refuses writes above this: its maxmemory, or, where it has none, what we take for it."""
    high_water: int
    """Surplus groups are published up to this."""
    policy: str
    """Its maxmemory-policy."""


@dataclass(frozen=True)
class SizeProblem:
    """A setting that can't be right for sizes that a run may reach."""

    setting: str
    message: str
    fatal: bool = True
    """False: the run may do without, if answers stay shorter than they may become."""


def worst_bytes(config: RunConfig, prompt_tokens: int, *, expert_bytes: int = 0) -> int:
    """The bytes of a group whose answers are as long as they may be. `expert_bytes`: of a token's routed experts."""
    tokens = prompt_tokens + config.rollout.samples_per_prompt * config.rollout.max_new_tokens
    return GROUP_BYTES + (TOKEN_BYTES + expert_bytes) * tokens


def size_problems(config: RunConfig, *, expert_bytes: int = 0, memory: RedisMemory | None = None) -> list[SizeProblem]:
    """Find what a run of this configuration would run into, with the numbers. `memory`: of its Redis, where known."""
    rollout, board, trainer = config.rollout, config.board, config.trainer
    problems = []
    answers = rollout.samples_per_prompt * rollout.max_new_tokens
    generated = (GENERATED_BYTES + expert_bytes) * answers
    if generated > board.max_group_bytes:
        problems.append(
            SizeProblem(
                "board.max_group_bytes",
                f"= {board.max_group_bytes}, but a group's answers take up to {generated} bytes "
                f"({rollout.samples_per_prompt} samples x {rollout.max_new_tokens} tokens x "
                f"{GENERATED_BYTES + expert_bytes} bytes): groups of long answers would all be dropped. Raise it, or "
                "lower rollout.max_new_tokens or rollout.samples_per_prompt",
            )
        )
    if memory is None:
        return problems
    if memory.policy != "noeviction":
        problems.append(
            SizeProblem(
                "",
                f"Redis has maxmemory-policy {memory.policy}, with which it forgets groups when it is full: set "
                "maxmemory-policy noeviction",
            )
        )
    if board.high_water_bytes > memory.most:
        problems.append(
            SizeProblem(
                "board.high_water_bytes",
                f"= {board.high_water_bytes}, but Redis takes only {memory.most} bytes (its maxmemory): leave it unset "
                "for four fifths of that, or raise maxmemory",
            )
        )
    worst = trainer.groups_per_step * worst_bytes(config, config.data.max_prompt_tokens, expert_bytes=expert_bytes)
    if worst > memory.most:
        expected = int(worst * EXPECTED_SHARE)
        advice = "If many answers are that long, the run waits until its maxmemory is raised"
        if expected > memory.most:
            advice = f"Raise its maxmemory to at least {megabytes(expected)}, better {megabytes(worst)}"
        problems.append(
            SizeProblem(
                "trainer.groups_per_step",
                f"= {trainer.groups_per_step}: a step takes up to {megabytes(worst)} in Redis "
                f"({trainer.groups_per_step} groups x {rollout.samples_per_prompt} samples x {rollout.max_new_tokens} "
                f"tokens x {TOKEN_BYTES + expert_bytes} bytes), which has room for {megabytes(memory.most)}. {advice}",
                fatal=expected > memory.most,
            )
        )
    return problems
