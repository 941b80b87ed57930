"""Sizes of groups, and checks that a run's steps fit into Redis."""

from collections.abc import Iterator
from dataclasses import dataclass

from relaxd.board.stages import stages_for
from relaxd.config import RunConfig
from relaxd.text import byte_amount

NO_EVICTION = "noeviction"
"""Redis's maxmemory-policy under which it evicts no keys."""
TEXT_BYTES = 11
"""Estimated maximum size of one token's text, in bytes."""
GROUP_BYTES = 4096
"""Estimated size of a group in Redis without its tokens, in bytes."""
MEDIA_TOKEN_BYTES = {"image": 3200, "video": 6400, "audio": 3200}
"""Maximum size of stored media per token, in bytes, by kind of medium. Image: a PNG of 32 x 32 pixels of noise; video:
two such frames; audio: a WAV of a thirteenth of a second."""
EXPECTED_SHARE = 0.25
"""Length of answers at which a step must fit into Redis, as a share of rollout.max_new_tokens (for media, of
data.max_prompt_tokens). Few tasks have shorter answers."""


@dataclass(frozen=True)
class RedisMemory:
    """Use and limits of the memory of a Redis, or of all data nodes together, in bytes."""

    used: int
    max_bytes: int
    """Redis's maxmemory, above which it refuses writes; if it has none, the limit that the gate assumes."""
    high_water: int
    """Maximum size of open groups, stored and reserved, with which the gate admits surplus groups."""
    policy: str
    """Redis's maxmemory-policy, such as "noeviction"."""


@dataclass(frozen=True)
class SizeProblem:
    """Size limit that a group, step or message of the run may exceed, with the setting to change."""

    setting: str
    message: str
    fatal: bool = True
    """True if the run is refused; False if it works as long as answers stay well below their maximum length."""


def worst_bytes(config: RunConfig, prompt_tokens: int, *, expert_bytes: int = 0) -> int:
    """Return the size in bytes of a group whose answers have maximum length.

    `expert_bytes`: size of the column of routed experts, in bytes per token.
    """
    tokens = prompt_tokens + config.rollout.samples_per_prompt * sample_tokens(config)
    return GROUP_BYTES + (_stored_bytes(config) + expert_bytes) * tokens


def media_bytes(config: RunConfig, tokens: int) -> int:
    """Return the maximum size in bytes of media that take `tokens` tokens; 0 in a run without media."""
    return tokens * max((MEDIA_TOKEN_BYTES[kind] for kind in config.media_kinds), default=0)


def sample_tokens(config: RunConfig) -> int:
    """Return the maximum number of tokens of a sample; in conversations each sequence may also have a prompt."""
    own = config.data.max_prompt_tokens if config.agent.is_there else 0
    return config.agent.sequences * (config.rollout.max_new_tokens + own)


def size_problems(
    config: RunConfig, *, expert_bytes: int = 0, memory: RedisMemory | None = None
) -> Iterator[SizeProblem]:
    """Yield a problem for each size limit that the run may exceed. `memory`: that of the run's Redis, if known."""
    rollout, board, trainer = config.rollout, config.board, config.trainer
    length = sample_tokens(config)
    answers = rollout.samples_per_prompt * length
    bytes_of = {stage.name: stage.token_bytes for stage in stages_for(config)}
    bytes_of["rollout"] += expert_bytes
    stage = max(bytes_of, key=lambda name: bytes_of[name])
    if (written := bytes_of[stage] * answers) > board.max_group_bytes:
        what, less = "a group's answers take", "agent.max_sequences, " if config.agent.sequences > 1 else ""
        if stage != "rollout":
            what, less = f"for a group stage {stage!r} writes", f"{less}algorithm.distill_top_k, "
        yield SizeProblem(
            "board.max_group_bytes",
            f"= {board.max_group_bytes}, but {what} up to {written} bytes ({rollout.samples_per_prompt} samples x "
            f"{length} tokens x {bytes_of[stage]} bytes): groups of long answers would all be "
            f"dropped. Raise it, or lower {less}rollout.max_new_tokens or rollout.samples_per_prompt",
        )
    if (media := media_bytes(config, config.data.max_prompt_tokens)) > board.max_group_bytes:
        yield SizeProblem(
            "board.max_group_bytes",
            f"= {board.max_group_bytes}, but the media of a prompt take up to {media} bytes "
            f"({config.data.max_prompt_tokens} tokens x {media_bytes(config, 1)} bytes): a prompt with as many "
            "would end the run. Raise it, or lower data.max_prompt_tokens",
        )
    if memory is None:
        return
    place, any_of = "Redis", "Redis"
    if board.data_urls:
        place, any_of = "all data nodes (board.data_urls)", "Redis or a data node"
    if memory.policy != NO_EVICTION:
        yield SizeProblem(
            "",
            f"{any_of} has maxmemory-policy {memory.policy}, with which it forgets groups when it is full: set "
            "maxmemory-policy noeviction",
        )
    if board.high_water_bytes > memory.max_bytes:
        yield SizeProblem(
            "board.high_water_bytes",
            f"= {board.high_water_bytes}, but {place} takes only {memory.max_bytes} bytes (its maxmemory): leave "
            "it unset for four fifths of that, or raise maxmemory",
        )
    text = worst_bytes(config, config.published_prompt_tokens, expert_bytes=expert_bytes)
    worst = trainer.groups_per_step * (text + media)
    if worst > memory.max_bytes:
        # Few samples have many sequences.
        expected = int(trainer.groups_per_step * (text / config.agent.sequences + media) * EXPECTED_SHARE)
        of_media = f", and for each group {byte_amount(media)} of its prompt's media" if media else ""
        advice = "If many answers are that long, the run waits until its maxmemory is raised"
        if expected > memory.max_bytes:
            advice = f"Raise its maxmemory to at least {byte_amount(expected)}, better {byte_amount(worst)}"
        yield SizeProblem(
            "trainer.groups_per_step",
            f"= {trainer.groups_per_step}: a step takes up to {byte_amount(worst)} in {place} "
            f"({trainer.groups_per_step} groups x {rollout.samples_per_prompt} samples x {length} "
            f"tokens x {_stored_bytes(config) + expert_bytes} bytes{of_media}), which has room for "
            f"{byte_amount(memory.max_bytes)}. {advice}",
            fatal=expected > memory.max_bytes,
        )


def message_problem(config: RunConfig, max_bytes: int) -> SizeProblem | None:
    """Return a problem if the media in a request to an engine may exceed `max_bytes`, the maximum size of a message.

    A request has all media of the prompt, and of the conversation so far.
    """
    prompt, of_token = config.data.max_prompt_tokens, media_bytes(config, 1)
    setting, most, what = "data.max_prompt_tokens", 0, "a prompt"
    if config.agent.is_there:
        answers = {"rollout": config.rollout.max_new_tokens, "eval": config.eval.max_new_tokens}
        answers |= {f"eval.sets.{number}": one.max_new_tokens for number, one in enumerate(config.eval.sets)}
        section = max(answers, key=lambda name: answers[name])
        setting, most, what = f"{section}.max_new_tokens", answers[section], "a conversation"
    if (media := (prompt + most) * of_token) <= max_bytes:
        return None
    both = ("data.max_prompt_tokens + " if most else "") + setting
    return SizeProblem(
        setting,
        f"= {most or prompt}, but the media of {what} take up to {media} bytes ({both} = {prompt + most} tokens x "
        f"{of_token} bytes), and a request has all of them: a message has at most {max_bytes} bytes. Lower {both} to "
        f"at most {max_bytes // of_token}",
    )


def _stored_bytes(config: RunConfig) -> int:
    """Return the upper bound of the bytes per token in the columns of all stages."""
    return TEXT_BYTES + sum(stage.token_bytes for stage in stages_for(config))
