"""What a configuration needs in Redis, and what is refused before a run begins."""

from typing import Any

import pytest

from relaxd.board import RedisMemory, message_problem, size_problems, worst_bytes
from relaxd.board.sizes import media_bytes, sample_tokens
from relaxd.config import AgentConfig, RunConfig
from relaxd.text import byte_amount

GB = 1 << 30


def config(groups: int, n: int, tokens: int, top_k: int = 0, of: str = "teacher", **board: Any) -> RunConfig:
    distilled = {"name": "opd", "distill_coef": 0.0, "distill_loss_coef": 1.0, "distill_top_k": top_k}
    distilled |= {"distill_candidates": of} if top_k else {}
    return RunConfig.model_validate(
        {
            "run": {"steps": 1},
            "model": {"path": "m"},
            "data": {"source": "addition"},
            "reward": {"name": "addition"},
            "rollout": {"samples_per_prompt": n, "max_new_tokens": tokens},
            "trainer": {"groups_per_step": groups},
            "board": board,
            **({"algorithm": distilled, "roles": {"teacher": {"model": "t"}}} if top_k else {}),
        }
    )


def memory(most: int, policy: str = "noeviction") -> RedisMemory:
    return RedisMemory(used=0, max_bytes=most, high_water=most * 4 // 5, policy=policy)


def test_the_worst_case_counts_every_token() -> None:
    assert worst_bytes(config(128, 16, 16_384), 1024) == 4096 + 32 * (1024 + 16 * 16_384)
    assert worst_bytes(config(128, 16, 16_384), 0, expert_bytes=1536) == 4096 + 1568 * 16 * 16_384


def test_a_conversation_may_carry_a_prompt_of_its_own() -> None:
    plain = config(128, 16, 16_384)
    talks = plain.model_copy(update={"agent": AgentConfig(environment="calculator")})
    more = 32 * 16 * plain.data.max_prompt_tokens
    assert worst_bytes(talks, 1024) == worst_bytes(plain, 1024) + more
    (problem,) = size_problems(talks, memory=memory(GB // 2))
    assert f"x {16_384 + plain.data.max_prompt_tokens} tokens x 32 bytes" in problem.message


def test_each_history_of_a_program_counts_with_its_prompt() -> None:
    agents = [AgentConfig(command=("program",), max_sequences=most) for most in (1, 3)]
    one, three = (config(4, 2, 100).model_copy(update={"agent": agent}) for agent in agents)
    assert sample_tokens(one) == 100 + one.data.max_prompt_tokens
    assert sample_tokens(three) == 3 * sample_tokens(one)
    assert worst_bytes(three, 0) - 4096 == 3 * (worst_bytes(one, 0) - 4096)


@pytest.mark.parametrize(
    ("groups", "n", "tokens", "most", "fatal"),
    [
        (128, 16, 16_384, 2 * GB, None),  # 1.1 GB
        (512, 16, 20_480, 6 * GB, None),  # 5.4 GB
        (512, 16, 20_480, 2 * GB, False),  # if answers are short enough
        (512, 16, 20_480, GB, True),
        (32, 8, 262_144, 4 * GB, None),
    ],
)
def test_a_step_that_cannot_fit_is_refused_with_the_numbers(
    groups: int, n: int, tokens: int, most: int, fatal: bool | None
) -> None:
    problems = list(size_problems(config(groups, n, tokens), memory=memory(most)))
    assert [problem.fatal for problem in problems] == ([] if fatal is None else [fatal])
    for problem in problems:
        assert problem.setting == "trainer.groups_per_step"
        assert f"{groups} groups x {n} samples x {tokens} tokens x 32 bytes" in problem.message
        assert "maxmemory" in problem.message


def test_groups_that_would_all_be_refused_are_refused_once() -> None:
    (problem,) = size_problems(config(8, 16, 32_768, max_group_bytes=1 << 20))
    assert problem.setting == "board.max_group_bytes"
    assert "8912896 bytes (16 samples x 32768 tokens x 17 bytes)" in problem.message
    (problem,) = size_problems(config(8, 16, 16_384), expert_bytes=1536)  # 48 layers, top 8
    assert "x 1553 bytes" in problem.message


def test_candidates_of_a_teacher_count_with_all_their_bytes() -> None:
    assert worst_bytes(config(128, 16, 16_384, top_k=64), 0) == 4096 + (32 + 64 * 8) * 16 * 16_384
    assert not list(size_problems(config(8, 16, 16_384, top_k=64)))
    (problem,) = size_problems(config(8, 16, 20_480, top_k=128))
    assert problem.setting == "board.max_group_bytes"
    assert "stage 'teacher' writes up to 335544320 bytes (16 samples x 20480 tokens x 1024 bytes)" in problem.message
    assert "lower algorithm.distill_top_k, rollout.max_new_tokens" in problem.message
    (problem,) = size_problems(config(512, 16, 16_384, top_k=64), memory=memory(16 * GB))
    assert problem.fatal
    assert "16384 tokens x 544 bytes" in problem.message


def test_the_students_candidates_count_beside_the_teachers() -> None:
    """Four bytes for each of the student's on their way to the teacher, and eight for each that is compared."""
    tokens = 16 * 16_384
    assert worst_bytes(config(128, 16, 16_384, top_k=64, of="student"), 0) == 4096 + (32 + 64 * (4 + 8)) * tokens
    assert worst_bytes(config(128, 16, 16_384, top_k=64, of="union"), 0) == 4096 + (32 + 64 * (4 + 16)) * tokens


def test_a_redis_that_forgets_groups_is_refused() -> None:
    (problem,) = size_problems(config(8, 8, 256), memory=memory(GB, policy="allkeys-lru"))
    assert "maxmemory-policy allkeys-lru" in problem.message
    (problem,) = size_problems(config(8, 8, 256, high_water_bytes=2 * GB), memory=memory(GB))
    assert problem.setting == "board.high_water_bytes"


@pytest.mark.parametrize(("kind", "of_token"), [("image", 3200), ("video", 6400), ("audio", 3200)])
def test_media_count_for_each_token_of_a_prompt(kind: str, of_token: int) -> None:
    plain = config(128, 16, 1024)
    data = plain.data.model_copy(update={"media_keys": {kind: "column"}, "max_prompt_tokens": 8192})
    seeing = plain.model_copy(update={"data": data})
    assert media_bytes(plain, 8192) == 0
    assert media_bytes(seeing, 8192) == of_token * 8192
    assert worst_bytes(seeing, 8192) == worst_bytes(plain, 8192)
    most = 128 * (worst_bytes(plain, 8192) + of_token * 8192)
    assert not list(size_problems(seeing, memory=memory(most)))
    (problem,) = size_problems(seeing, memory=memory(most - 1))
    assert not problem.fatal
    assert f"for each group {byte_amount(of_token * 8192)} of its prompt's media" in problem.message
    (problem,) = size_problems(seeing, memory=memory(most // 4 - 1))
    assert problem.fatal
    board = plain.board.model_copy(update={"max_group_bytes": of_token * 8192 - 1})
    (problem,) = size_problems(seeing.model_copy(update={"board": board}))
    assert problem.setting == "board.max_group_bytes"
    assert f"up to {of_token * 8192} bytes (8192 tokens x {of_token} bytes)" in problem.message


def test_media_of_a_conversation_must_fit_into_a_message() -> None:
    values: dict[str, Any] = {
        "run": {"steps": 1},
        "model": {"path": "none"},
        "data": {"source": "addition", "max_prompt_tokens": 1000, "media_keys": {"image": "column"}},
        "reward": {"name": "addition"},
        "rollout": {"max_new_tokens": 3000},
        "eval": {"max_new_tokens": 4000},
    }
    plain = RunConfig.model_validate(values)
    talking = RunConfig.model_validate(values | {"agent": {"environment": "calculator", "media": ["video"]}})
    assert message_problem(plain, 3200 * 1000) is None
    assert message_problem(talking, 6400 * 5000) is None
    alone, together = message_problem(plain, 3_199_999), message_problem(talking, 31_999_999)
    assert alone is not None
    assert together is not None
    assert (alone.setting, together.setting) == ("data.max_prompt_tokens", "eval.max_new_tokens")
    assert alone.message == (
        "= 1000, but the media of a prompt take up to 3200000 bytes (data.max_prompt_tokens = 1000 tokens x 3200 "
        "bytes), and a request has all of them: a message has at most 3199999 bytes. Lower data.max_prompt_tokens to "
        "at most 999"
    )
    both = "data.max_prompt_tokens + eval.max_new_tokens"
    assert together.message.startswith("= 4000, but the media of a conversation take up to 32000000 bytes")
    assert f"({both} = 5000 tokens x 6400 bytes)" in together.message
    assert together.message.endswith(f"Lower {both} to at most 4999")
