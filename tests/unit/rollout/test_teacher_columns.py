"""What a teacher with an engine asks of it, what it makes of the answers, and what it refuses."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from relaxd.board import CANDIDATES, TEACHER_CANDIDATE_LOGPROBS, TEACHER_LOGPROBS, Drop, DropReason
from relaxd.rpc.errors import DeadlineExceeded
from services.rollout.engines.request_types import RequestFailed
from services.rollout.teacher import REQUEST_SECONDS, TOKENS_PER_SECOND, TeacherColumns, TokenBudget

Answer = tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]
ALL = (TEACHER_LOGPROBS, CANDIDATES, TEACHER_CANDIDATE_LOGPROBS)


class Engine:
    """Answers with -token / 100 for each token, and as likeliest tokens the next ids; notes what it was asked."""

    def __init__(self, change: Callable[[Answer], Answer] = lambda answer: answer) -> None:
        self.asked: list[tuple[list[int], int]] = []
        self.seconds: list[float] = []
        self.running = self.most_tokens = 0
        self._change = change

    async def __call__(self, tokens: NDArray[np.integer], start: int, top_k: int, seconds: float) -> Answer:
        self.asked.append((tokens.tolist(), start))
        self.seconds.append(seconds)
        self.running += len(tokens)
        self.most_tokens = max(self.most_tokens, self.running)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        self.running -= len(tokens)
        own = tokens[start:]
        ids = (own[:, None] + np.arange(top_k)).astype(np.int32)
        return self._change(((-own / 100).astype(np.float32), ids, (-ids / 100).astype(np.float32)))


def teacher(engine: Callable[..., Awaitable[Answer]], **changes: Any) -> TeacherColumns:
    values: dict[str, Any] = {
        "prompt": "prompt_tokens",
        "columns": ALL,
        "top_k": 2,
        "vocabulary": 100,
        "ids_below": 90,
        "context": 80,
        "max_tokens": 1000,
    }
    return TeacherColumns(engine, **values | changes)


def group(prompt: int = 3, lengths: tuple[int, ...] = (4, 2), **changes: Any) -> dict[str, Any]:
    total = sum(lengths)
    return {
        "prompt_tokens": np.arange(prompt, dtype=np.int32),
        "tokens": np.arange(10, 10 + total, dtype=np.int32),
        "lengths": np.array(lengths, np.int32),
        "loss_mask": np.ones(total, np.uint8),
        "shares_prompt": np.ones(len(lengths), np.uint8),
    } | changes


def columns_of(asked: TeacherColumns, columns: dict[str, Any]) -> Any:
    return asyncio.run(asked.of_group("g1", columns))


def test_only_the_tokens_that_are_trained_on_are_asked_about() -> None:
    """From the first to the last of them; what is between has no value."""
    mask = np.array([0, 1, 0, 1, 0, 0, 0, 0, 0], np.uint8)
    engine = Engine()
    found = columns_of(teacher(engine), group(lengths=(6, 3), loss_mask=mask))
    assert engine.asked == [([0, 1, 2, 10, 11, 12, 13], 4)]
    np.testing.assert_allclose(found[TEACHER_LOGPROBS], [0, -0.11, 0, -0.13, 0, 0, 0, 0, 0], atol=1e-6)
    assert found[TEACHER_LOGPROBS].dtype == found[TEACHER_CANDIDATE_LOGPROBS].dtype == np.float32
    assert found[CANDIDATES].dtype == np.int32
    assert found[CANDIDATES].tolist()[:4] == [[-1, -1], [11, 12], [-1, -1], [13, 14]]
    assert (found[CANDIDATES][4:] == -1).all()
    np.testing.assert_allclose(found[TEACHER_CANDIDATE_LOGPROBS][1], [-0.11, -0.12], atol=1e-6)
    assert found.keys() == set(ALL)
    assert columns_of(teacher(Engine(), columns=[TEACHER_LOGPROBS]), group()).keys() == {TEACHER_LOGPROBS}


def test_sequences_with_a_prompt_of_their_own_are_asked_about_without_the_groups() -> None:
    mask = np.array([1, 1, 1, 1, 0, 1], np.uint8)
    engine = Engine()
    shares = np.array([1, 0], np.uint8)
    columns_of(teacher(engine), group(loss_mask=mask, shares_prompt=shares))
    assert engine.asked == [([0, 1, 2, 10, 11, 12, 13], 3), ([14, 15], 1)]
    dropped = columns_of(teacher(Engine()), group(shares_prompt=shares))
    assert (dropped.reason, dropped.detail) == (
        DropReason.MALFORMED,
        "sequence 1 begins with a token that is trained on, but nothing predicts a first token",
    )


def test_a_long_prompt_is_prefilled_once_before_the_others_come() -> None:
    engine = Engine()
    columns_of(teacher(engine), group(prompt=70, lengths=(2, 3, 4)))
    assert engine.most_tokens == 70 + 3 + 70 + 4  # the first went alone
    columns_of(teacher(engine := Engine()), group(prompt=20, lengths=(2, 3, 4)))
    assert engine.most_tokens == 3 * 20 + 9


def test_a_candidate_that_the_student_does_not_have_is_none() -> None:
    tokens = np.array([88, 89, 95, 10, 11, 12], np.int32)
    found = columns_of(teacher(Engine()), group(tokens=tokens))
    assert found[CANDIDATES].tolist()[:3] == [[88, 89], [89, -1], [-1, -1]]
    assert found[TEACHER_CANDIDATE_LOGPROBS][1, 1] == 0


def cut(answer: Answer) -> Answer:
    return answer[0][1:], answer[1][1:], answer[2][1:]


def without_number(answer: Answer) -> Answer:
    return np.where(np.arange(len(answer[0])) == 1, np.float32("nan"), answer[0]), answer[1], answer[2]


def infinite_candidate(answer: Answer) -> Answer:
    return answer[0], answer[1], np.full_like(answer[2], -np.inf)


def failing(answer: Answer) -> Answer:
    raise RequestFailed("out of luck")


@pytest.mark.parametrize(
    ("change", "reason", "detail"),
    [
        (cut, DropReason.MALFORMED, "the teacher's engine gives 3 log-probs for 4 tokens of an answer"),
        (without_number, DropReason.NO_LOGPROBS, "gives 1 of 4 tokens of an answer a log-prob that isn't finite"),
        (infinite_candidate, DropReason.NO_LOGPROBS, "4 of 4 tokens of an answer a log-prob that isn't finite"),
        (failing, DropReason.NO_LOGPROBS, "the teacher's engine failed: out of luck"),
    ],
)
def test_an_answer_that_says_nothing_drops_the_group(
    change: Callable[[Answer], Answer], reason: DropReason, detail: str
) -> None:
    asked = teacher(Engine(change))
    dropped = columns_of(asked, group())
    assert isinstance(dropped, Drop)
    assert dropped.reason == reason
    assert detail in dropped.detail
    assert not asked.tokens_in_flight


@pytest.mark.parametrize(
    ("changes", "reason", "detail"),
    [
        ({"tokens": np.full(6, 100, np.int32)}, DropReason.NO_LOGPROBS, "it has token 100, but the teacher has only"),
        ({"prompt": 78}, DropReason.TOO_LONG, "a sequence has 82 tokens with its prompt, but the teacher's engine"),
        ({"lengths": np.array([4, 1])}, DropReason.MALFORMED, "lengths add up to 5, but tokens has 6 values"),
        ({"loss_mask": np.ones(6)}, DropReason.MALFORMED, "must be arrays [values] of integers"),
        ({"shares_prompt": np.ones(3, int)}, DropReason.MALFORMED, "shares_prompt has 3 values for 2 sequences"),
    ],
)
def test_a_group_that_can_not_be_asked_about_is_dropped(
    changes: dict[str, Any], reason: DropReason, detail: str
) -> None:
    columns = group(changes.pop("prompt", 3)) | changes
    dropped = columns_of(teacher(engine := Engine()), columns)
    assert (dropped.reason, engine.asked) == (reason, [])
    assert detail in dropped.detail


def test_deadlines_grow_with_the_tokens_in_flight_and_a_late_engine_is_told_of() -> None:
    columns_of(teacher(engine := Engine()), group(prompt=20, lengths=(30, 10)))
    assert engine.seconds == [REQUEST_SECONDS + 50 / TOKENS_PER_SECOND, REQUEST_SECONDS + 80 / TOKENS_PER_SECOND]
    late: list[str] = []

    async def too_late(*arguments: Any) -> Answer:
        raise DeadlineExceeded("late")

    with pytest.raises(DeadlineExceeded):
        columns_of(teacher(too_late, on_late=late.append), group())
    assert "the teacher's engine didn't answer within 120 s" in late[0]


def test_tokens_in_flight_are_bounded_and_a_large_request_is_not_passed_by() -> None:
    async def run() -> list[str]:
        budget, order, release = TokenBudget(100), [], asyncio.Event()

        async def hold(name: str, tokens: int) -> None:
            async with budget.hold(tokens):
                order.append(name)
                assert budget.used <= 100 or budget.used == tokens
                await release.wait()

        tasks = [asyncio.create_task(hold(name, tokens)) for name, tokens in (("a", 60), ("b", 300), ("c", 10))]
        for _ in range(5):
            await asyncio.sleep(0)
        assert (order, budget.used) == (["a"], 60)  # c would fit, but is behind b
        release.set()
        await asyncio.gather(*tasks)
        assert not budget.used
        return order

    assert asyncio.run(run()) == ["a", "b", "c"]


def test_one_waiting_request_can_be_given_up() -> None:
    async def run() -> None:
        budget = TokenBudget(10)
        async with budget.hold(8):
            waiting = asyncio.create_task(budget.hold(5).__aenter__())
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
        async with asyncio.timeout(5), budget.hold(10):
            assert budget.used == 10

    asyncio.run(run())


def test_it_holds_twice_the_groups_that_the_engine_may_have() -> None:
    asked = teacher(Engine(), max_tokens=100)
    assert asked.most_groups() == 2
    columns_of(asked, group(prompt=1, lengths=(4, 4)))
    assert asked.most_groups() == 20
