"""What an engine's process says, as it arrives, and what the stage makes of it."""

import json

import numpy as np
import pytest

from relaxd.board import stages_for
from services.rollout.engines.output_encoding import decode_output, encode_output, pack_messages
from services.rollout.engines.types import Output
from services.rollout.service.group_generator import group_columns
from tests.unit.rollout.configs import run_config


def answer(index: int, count: int, experts: int | None = None) -> Output:
    output = Output(index, list(range(count)), [-0.5 - token for token in range(count)], [3] * count, "length", "text")
    if experts is not None:
        output.routed_experts = np.full((count + 1, 2, 4), experts, dtype=np.int32)
    return output


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
    assert decode_output(json.loads(json.dumps(encode_output(output)))) == output


def test_outputs_are_divided_over_messages_and_what_fits_none_is_named() -> None:
    outputs = {name: [encode_output(answer(index, 40, 7)) for index in range(3)] for name in ("a", "b")}
    outputs["b"].append(encode_output(answer(9, 4000, 7)))
    whole, nothing = pack_messages(outputs, 1 << 20)
    assert (whole, nothing) == ([outputs], {})
    messages, too_large = pack_messages(outputs, 8000)
    assert list(too_large) == ["b"]
    assert too_large["b"] > 100_000
    assert len(messages) == 3
    assert all(len(json.dumps(message)) <= 8000 for message in messages)
    samples = [(name, words["sample"]) for message in messages for name, each in message.items() for words in each]
    assert samples == [(name, index) for name in ("a", "b") for index in range(3)]


def test_routed_experts_arrive_with_their_shape() -> None:
    sent = answer(0, 3)
    sent.routed_experts = np.arange(4 * 2 * 3, dtype=np.int32).reshape(4, 2, 3)
    experts = decode_output(json.loads(json.dumps(encode_output(sent)))).routed_experts
    assert experts is not None
    assert experts.dtype == np.int32
    np.testing.assert_array_equal(experts, sent.routed_experts)


def test_the_stage_writes_routed_experts_only_where_they_are_asked_for() -> None:
    asked = run_config(engine="sglang", return_routed_experts=True)
    for config in (run_config(engine="sglang"), asked):
        wanted = config.rollout.return_routed_experts
        samples = [answer(0, 3, 7 if wanted else None), answer(1, 5, 8 if wanted else None)]
        columns = group_columns(samples, routed_experts=wanted)
        assert set(columns) == set(stages_for(config)[0].writes)
        assert ("routed_experts" in columns) == wanted
    assert columns["routed_experts"].shape == (4 + 6, 2, 4)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"rollout\.return_routed_experts is true"):
        group_columns([answer(0, 3, 7), answer(1, 5)], routed_experts=True)
