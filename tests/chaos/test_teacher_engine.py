"""The scripted engine of a teacher: what it answers, and that none of its wrong answers becomes a column."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from relaxd.board import CANDIDATES, TEACHER_CANDIDATE_LOGPROBS, TEACHER_LOGPROBS, Drop, DropReason
from relaxd.config import RolloutConfig
from relaxd.v1 import engine_pb2
from services.rollout.teacher import TeacherColumns
from tests.chaos.teacher_engine import FAILING_VARIABLE, WRONG_ANSWERS, Teacher
from tests.kit.models import make_tiny_model

TEMPERATURE, TOP_K = 0.7, 3
GROUP = {
    "prompt_tokens": np.arange(40, 45, dtype=np.int32),
    "tokens": np.arange(100, 104, dtype=np.int32),
    "lengths": np.array([4], np.int32),
    "loss_mask": np.ones(4, np.uint8),
    "shares_prompt": np.ones(1, np.uint8),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FAILING_VARIABLE, str(tmp_path / "failing"))
    return make_tiny_model(tmp_path / "teacher")


def columns_of(folder: Path) -> TeacherColumns:
    teacher = Teacher(str(folder), RolloutConfig(temperature=TEMPERATURE, dtype="float32"))

    async def compute(tokens: NDArray[np.integer], start: int, top_k: int, seconds: float) -> Any:
        request = engine_pb2.ComputeLogprobsRequest(
            tokens=np.asarray(tokens, np.int32).tobytes(), start=start, top_k=top_k
        )
        answer = teacher.logprobs(request)
        logprobs = np.frombuffer(answer.logprobs, np.float32)
        ids = np.frombuffer(answer.likeliest, np.int32).reshape(-1, top_k)
        return logprobs, ids, np.frombuffer(answer.likeliest_logprobs, np.float32).reshape(-1, top_k)

    asked: Callable[..., Awaitable[Any]] = compute
    return TeacherColumns(
        asked,
        prompt="prompt_tokens",
        columns=(TEACHER_LOGPROBS, CANDIDATES, TEACHER_CANDIDATE_LOGPROBS),
        top_k=TOP_K,
        vocabulary=259,
        ids_below=259,
        context=64,
        max_tokens=1000,
    )


async def test_it_answers_as_transformers_does(folder: Path) -> None:
    found: Any = await columns_of(folder).of_group("g", GROUP)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tokens = torch.arange(100, 104)
    with torch.inference_mode():
        logits = model(torch.cat([torch.arange(40, 45), tokens])[None]).logits[0, 4:-1]
    exact = (logits / TEMPERATURE).log_softmax(-1)
    np.testing.assert_allclose(found[TEACHER_LOGPROBS], exact.gather(-1, tokens[:, None])[:, 0], atol=1e-5)
    np.testing.assert_allclose(found[TEACHER_CANDIDATE_LOGPROBS], exact.topk(TOP_K).values, atol=1e-5)


async def test_each_wrong_answer_drops_the_group_and_says_why(folder: Path) -> None:
    columns, failing = columns_of(folder), folder.with_name("failing")
    failing.touch()
    drops: list[Any] = [await columns.of_group("g", GROUP) for _ in range(3)]
    assert all(isinstance(drop, Drop) for drop in drops)
    assert {drop.reason for drop in drops} == {DropReason.MALFORMED, DropReason.NO_LOGPROBS}
    assert all(any(words in drop.detail for drop in drops) for words in WRONG_ANSWERS)
    failing.unlink()
    assert not isinstance(await columns.of_group("g", GROUP), Drop)
