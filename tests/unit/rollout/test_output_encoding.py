"""What an engine's process says, as it arrives, and what the stage makes of it."""

import asyncio
import time

import numpy as np
import pytest

from relaxd.board import Column, stages_for
from relaxd.config import RunConfig
from relaxd.models.shape import expert_dtype
from relaxd.v1 import engine_pb2
from services.rollout.engines import engine_process
from services.rollout.engines.engine_process import FLUSH_SECONDS, OutputStream
from services.rollout.engines.request_types import Output, decode_output, encode_output, join_outputs, pack_messages
from services.rollout.service.answers import Answers
from tests.unit.rollout.configs import run_config


def answer(index: int, count: int, experts: int | None = None) -> Output:
    output = Output(index, list(range(count)), [-0.5 - token for token in range(count)], [3] * count, "length", "text")
    if experts is not None:
        output.routed_experts = np.full((count + 1, 2, 4), experts, dtype=np.uint8)
    return output


def carried(output: Output) -> Output:
    """What arrives of an output."""
    return decode_output(engine_pb2.EngineOutput.FromString(encode_output("a", output).SerializeToString()))


@pytest.mark.parametrize(
    "output",
    [
        Output(3),
        Output(1, [5, 6, 7], [-0.25, -1.5, -2.0], [1, 1, 2]),
        Output(0, [1 << 20], [-3.25], [1 << 40], "stop", "ein Täg", True),
        Output(2, [], [], [], "abort"),
    ],
)
def test_outputs_arrive_as_they_were_sent(output: Output) -> None:
    arrived = carried(output)
    for name in ("tokens", "logprobs", "versions"):
        setattr(arrived, name, list(getattr(arrived, name)))
    assert arrived == output


def test_outputs_are_divided_over_messages_and_what_fits_none_is_named() -> None:
    outputs = [encode_output(name, answer(index, 100, 7)) for name in ("a", "b") for index in range(3)]
    (whole,) = pack_messages(outputs, 1 << 20, 1 << 20)
    assert list(whole.outputs) == outputs
    outputs.insert(5, encode_output("b", answer(9, 12_000, 7)))
    messages = pack_messages(outputs, 4500, 100_000)
    (failure,) = [failure for message in messages for failure in message.failures]
    assert (failure.request_id, failure.too_large) == ("b", True)
    assert "one answer is a message of 1" in failure.reason
    assert len(messages) == 5
    assert all(message.ByteSize() <= 4600 for message in messages)
    samples = [(output.request_id, output.sample) for message in messages for output in message.outputs]
    assert samples == [(name, index) for name in ("a", "b") for index in range(3)]
    (large,) = pack_messages([outputs[5]], 4500, 1 << 20)
    assert list(large.outputs) == [outputs[5]]


def test_outputs_of_a_sample_are_joined_in_order() -> None:
    parts = [("a", answer(0, 2)), ("b", Output(0, [5], [-1.0], [3])), ("a", Output(0, [9], [-2.0], [4], "stop", "all"))]
    (first, joined), (second, other) = join_outputs(parts)
    assert (first, second) == ("a", "b")
    assert joined == Output(0, [0, 1, 9], [-0.5, -1.5, -2.0], [3, 3, 4], "stop", "all")
    assert list(other.tokens) == [5]


async def test_tokens_come_several_times_a_second_and_ends_at_once() -> None:
    stream = OutputStream()
    messages = stream.messages()
    first = asyncio.create_task(anext(messages))
    started = time.monotonic()
    for token in range(3):
        stream.put({"a": [Output(0, [token], [-1.0], [0])]})
        await asyncio.sleep(0)
    (together,) = (await first).outputs
    assert time.monotonic() - started >= 0.8 * FLUSH_SECONDS
    assert decode_output(together).tokens.tolist() == [0, 1, 2]  # type: ignore[attr-defined]
    engine_process.FLUSH_SECONDS = 3600.0
    try:
        last = asyncio.create_task(anext(messages))
        stream.put({"a": [Output(0, [3], [-1.0], [0])]})
        await asyncio.sleep(0)
        stream.put({"a": [Output(0, [4], [-1.0], [0], "stop", "text")]})
        (end,) = (await asyncio.wait_for(last, 5)).outputs
        assert (end.finish_reason, end.text, decode_output(end).tokens.tolist()) == (1, "text", [3, 4])  # type: ignore[attr-defined]
        stream.fail("b", "broken")
        assert (await asyncio.wait_for(anext(messages), 5)).failures[0].reason == "broken"
    finally:
        engine_process.FLUSH_SECONDS = FLUSH_SECONDS


@pytest.mark.parametrize("turns", range(5))
async def test_a_reader_ends_when_it_is_cancelled_while_an_end_comes(turns: int) -> None:
    """It may be cancelled in any turn of the loop after the end has come, which it must not take for its own."""
    stream = OutputStream()

    async def read() -> None:
        async for _ in stream.messages():
            pass

    reader = asyncio.create_task(read())
    await asyncio.sleep(0)
    stream.put({"a": [Output(0, [0], [-1.0], [0])]})
    await asyncio.sleep(0.01)  # it waits for further tokens
    stream.put({"a": [Output(0, [1], [-1.0], [0], "stop", "text")]})
    for _ in range(turns):
        await asyncio.sleep(0)
    reader.cancel()
    (done, _) = await asyncio.wait({reader}, timeout=5)
    assert done
    assert reader.cancelled()


@pytest.mark.parametrize(("count", "dtype"), [(4, np.uint8), (256, np.uint8), (257, np.uint16), (512, np.uint16)])
def test_routed_experts_arrive_with_their_shape_and_width(count: int, dtype: type) -> None:
    sent = answer(0, 3)
    sent.routed_experts = np.linspace(0, count - 1, 4 * 2 * 3).astype(expert_dtype(count)).reshape(4, 2, 3)
    experts = carried(sent).routed_experts
    assert experts is not None
    assert experts.dtype == dtype
    assert experts.max() == count - 1
    np.testing.assert_array_equal(experts, sent.routed_experts)


def test_likeliest_tokens_arrive_as_they_were_sent_and_in_order() -> None:
    parts = [("a", Output(0, [4], [-1.0], [3], likeliest=[[4, 5]])), ("a", Output(0, [9], [-2.0], [3], "stop"))]
    parts[1][1].likeliest = [[8, 9]]
    ((_, joined),) = join_outputs(parts)
    arrived = carried(joined).likeliest
    assert isinstance(arrived, np.ndarray)
    assert (arrived.dtype, arrived.tolist()) == (np.int32, [[4, 5], [8, 9]])
    assert len(carried(Output(2, [], [], [], "abort")).likeliest) == 0


def test_the_stage_writes_the_likeliest_tokens_where_a_teacher_service_is_asked_about_them() -> None:
    """Those of every token, or none: a group that lacks some can't be taught."""

    def taught(of: str, **teacher: str) -> RunConfig:
        algorithm = {"name": "opd", "distill_coef": 0.0, "distill_loss_coef": 1.0, "distill_top_k": 2}
        sections = {
            "algorithm": algorithm | {"distill_candidates": of},
            "roles": {"teacher": {"model": "t"} | teacher},
        }
        return RunConfig.model_validate(run_config().model_dump(exclude_unset=True) | sections)

    of_teacher, asked = taught("teacher"), taught("union")
    samples = [answer(0, 3), answer(1, 2)]
    assert "student_candidates" not in columns_of(samples, of_teacher)
    with pytest.raises(ValueError, match="the engine returned them for 0 of 5 tokens"):
        columns_of(samples, asked)
    samples[0].likeliest = [[1, 2], [3, 4], [5, 6]]
    with pytest.raises(ValueError, match="the engine returned them for 3 of 5 tokens"):
        columns_of(samples, asked)
    samples[1].likeliest = [[7, 8], [9, 0]]
    ids = columns_of(samples, asked)["student_candidates"]
    assert isinstance(ids, np.ndarray)
    assert (ids.dtype, ids.tolist()) == (np.int32, [[1, 2], [3, 4], [5, 6], [7, 8], [9, 0]])
    needing = {stage.name for stage in stages_for(asked) if "student_candidates" in stage.needs}
    assert needing == {"teacher"}
    for other in (of_teacher, taught("union", placement="trainer")):
        assert not any("student_candidates" in (*stage.writes, *stage.needs) for stage in stages_for(other))


def test_the_stage_writes_routed_experts_only_where_they_are_asked_for() -> None:
    asked = run_config(engine="sglang", return_routed_experts=True)
    for config in (run_config(engine="sglang"), asked):
        wanted = config.rollout.return_routed_experts
        samples = [answer(0, 3, 7 if wanted else None), answer(1, 5, 8 if wanted else None)]
        columns = columns_of(samples, config)
        assert ("routed_experts" in columns) == wanted
    experts = columns["routed_experts"]
    assert isinstance(experts, np.ndarray)
    assert (experts.shape, experts.dtype) == ((4 + 6, 2, 4), np.uint8)
    with pytest.raises(ValueError, match=r"rollout\.return_routed_experts is true"):
        columns_of([answer(0, 3, 7), answer(1, 5)], asked)


def columns_of(samples: list[Output], config: RunConfig) -> dict[str, Column]:
    answers = Answers(len(samples))
    for sample in samples:
        answers.take(sample)
    return answers.columns(stages_for(config)[0].writes)
