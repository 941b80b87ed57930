"""What an external SGLang server streams: tokens put together, and the version of each."""

from typing import Any

import pytest

from relaxd.rpc.errors import InvalidArgument
from relaxd.v1 import sample_pb2, weights_pb2
from services.rollout.engines.request_types import RequestFailed, Version
from services.rollout.engines.sglang_external.external_engine import stock_buckets
from services.rollout.engines.sglang_external.external_requests import (
    ONLY_AT_END,
    EventStyle,
    ExternalSample,
    label,
    parse_label,
)
from services.rollout.engines.sglang_external.server_client import ServerGone

ONE, TWO = Version(3, 1), Version(3, 2)
STREAMED = EventStyle(incremental=True, interval=1, late=0)


def event(tokens: list[int], weights: str, finish: dict[str, Any] | None = None) -> dict[str, Any]:
    logprobs = [[-token / 10, token, None] for token in tokens]
    meta = {"weight_version": weights, "finish_reason": finish, "output_token_logprobs": logprobs}
    return {"output_ids": tokens, "meta_info": meta}


def new_sample(style: EventStyle) -> ExternalSample:
    return ExternalSample(0, style, ONE, lambda tokens: " ".join(map(str, tokens)))


def versions_of(style: EventStyle, *lengths_and_weights: tuple[int, Version]) -> list[int]:
    """The versions of a sample whose events end at these lengths."""
    sample, told = new_sample(style), 0
    for length, weights in lengths_and_weights:
        start = told if style.incremental else 0
        sample.take(event(list(range(start, length)), label(weights)))
        told = length
    sample.end("length")
    output = sample.undelivered()
    assert output.tokens == list(range(told))
    assert output.spans_weight_update == (lengths_and_weights[-1][1] != ONE)
    return output.versions


def test_a_streamed_sample_has_every_tokens_version() -> None:
    assert versions_of(STREAMED, (1, ONE), (2, ONE), (3, TWO), (4, TWO)) == [1, 1, 2, 2]


def test_a_token_that_was_under_way_counts_as_old() -> None:
    style = EventStyle(incremental=True, interval=1, late=1)
    assert versions_of(style, (1, ONE), (2, ONE), (3, TWO), (4, TWO)) == [1, 1, 1, 2]
    assert versions_of(style, (1, TWO), (2, TWO)) == [1, 2]  # its prompt may have been computed before


def test_tokens_between_two_events_count_as_old() -> None:
    style = EventStyle(incremental=True, interval=4, late=0)
    # The token after the event at 5 may be the last of version 1, but so may the one before the event at 9.
    assert versions_of(style, (1, ONE), (5, ONE), (9, TWO), (11, TWO)) == [1] * 8 + [2] * 3
    assert versions_of(style, (1, TWO), (5, TWO)) == [2] * 5


def test_a_server_that_repeats_itself_is_understood() -> None:
    style = EventStyle(incremental=False, interval=ONLY_AT_END, late=0)
    assert versions_of(style, (1, ONE), (6, ONE)) == [1] * 6
    assert versions_of(style, (1, ONE), (6, TWO)) == [1] * 6


def test_only_what_is_new_is_handed_on_and_the_text_at_the_end() -> None:
    sample = new_sample(STREAMED)
    sample.take(event([5, 6], "3:1"))
    first = sample.undelivered()
    assert (first.tokens, first.logprobs, first.finish_reason, first.text) == ([5, 6], [-0.5, -0.6], None, "")
    sample.take(event([7], "3:1", {"type": "stop", "matched": 7}))
    last = sample.undelivered()
    assert (last.tokens, last.finish_reason, last.text, last.spans_weight_update) == ([7], "stop", "5 6", False)


def test_a_stop_string_ends_the_text_and_not_the_tokens() -> None:
    sample = new_sample(STREAMED)
    sample.take(event([5, 6, 7], "3:1", {"type": "stop", "matched": "6 7"}))
    output = sample.undelivered()
    assert (output.tokens, output.finish_reason, output.text) == ([5, 6, 7], "stop", "5 ")


@pytest.mark.parametrize("weights", ["default", "3", ":", "3:x", ""])
def test_weights_that_nobody_gave_mean_another_server(weights: str) -> None:
    assert parse_label(weights) is None
    with pytest.raises(ServerGone, match="which relaxd did not give it"):
        new_sample(STREAMED).take(event([1], weights))


def test_a_sample_that_the_server_gives_up_fails_with_its_reason() -> None:
    finish = {"type": "abort", "message": "out of memory", "status_code": 500}
    with pytest.raises(RequestFailed, match="out of memory"):
        new_sample(STREAMED).take(event([1], "3:1", finish))


def manifest(*dtypes: int) -> weights_pb2.WeightManifest:
    message = weights_pb2.WeightManifest()
    bucket = message.buckets.add(source_rank=0)
    for number, dtype in enumerate(dtypes):
        bucket.tensors.add(name=f"t{number}", dtype=dtype, shape=[3])  # type: ignore[arg-type]
    return message


def test_buckets_in_the_servers_words() -> None:
    (bucket,) = stock_buckets(manifest(sample_pb2.ELEMENT_TYPE_FLOAT32, sample_pb2.ELEMENT_TYPE_BFLOAT16))
    assert bucket == {"names": ["t0", "t1"], "dtypes": ["float32", "bfloat16"], "shapes": [[3], [3]]}


@pytest.mark.parametrize(
    ("dtypes", "reason"),
    [
        ((sample_pb2.ELEMENT_TYPE_BFLOAT16, sample_pb2.ELEMENT_TYPE_FLOAT32), "t1 is float32 at byte 6"),
        ((sample_pb2.ELEMENT_TYPE_INT64,), "t0 is int64"),
    ],
)
def test_what_stock_servers_cannot_take_is_refused(dtypes: tuple[int, ...], reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason) as error:
        stock_buckets(manifest(*dtypes))
    assert error.value.violations[0][0] == "manifest"
