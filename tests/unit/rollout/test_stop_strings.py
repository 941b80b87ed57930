"""Stop strings that begin before a request and end in it."""

from services.rollout.engines.request_types import Sampling, Version, end_across
from services.rollout.engines.sglang_external.external_requests import EventStyle, ExternalSample


def text(tokens: list[int]) -> str:
    return "".join(map(chr, tokens))


def end(whole: str, begun: int, *stop: str, checked: int | None = None, least: int = 0) -> tuple[int, str] | None:
    return end_across(list(map(ord, whole)), begun, begun if checked is None else checked, stop, least, text)


def test_only_a_string_that_began_before_ends_an_answer_here() -> None:
    assert end("one STOP two", 5, "STOP") == (8, "STOP")
    assert end("one STOP two", 7, "TOP t", "STOP") == (8, "STOP")
    assert end("one STO", 5, "STOP") is None
    assert end("one STOP two", 0, "STOP") is None
    assert end("one two three STOP", 3, "STOP") is None  # the engine's own business
    assert end("one STOP two", 5) is None


def test_what_was_looked_at_is_not_looked_at_again_and_nothing_ends_too_early() -> None:
    assert end("one STOP two", 5, "STOP", checked=9) is None
    assert end("one STOP two", 5, "STOP", least=9) == (9, "STOP")


def test_an_external_servers_sample_ends_where_the_string_does() -> None:
    one = Version(1, 4)
    style = EventStyle(incremental=True, interval=4, late=0)
    begun = tuple(map(ord, "one ST"))
    sample = ExternalSample(0, style, one, lambda ids: text(list(ids)), begun, Sampling(50, stop=("STOP",)))
    tokens = list(map(ord, "OP two"))
    meta = {
        "weight_version": "1:4",
        "finish_reason": None,
        "output_token_logprobs": [[-token / 100, token, None] for token in tokens],
    }
    sample.take({"output_ids": tokens, "meta_info": meta})
    assert (sample.ended, sample.ended_here, sample.tokens) == (True, True, 2)
    output = sample.undelivered()
    assert (output.tokens, output.text, output.finish_reason) == (tokens[:2], "one ", "stop")
    assert (output.logprobs, output.versions) == ([-token / 100 for token in tokens[:2]], [4, 4])


def test_an_external_servers_sample_reports_only_what_is_new() -> None:
    style = EventStyle(incremental=False, interval=1, late=0)
    sample = ExternalSample(0, style, Version(1, 4), lambda ids: text(list(ids)), (97, 98))
    for count, label in ((1, "1:4"), (3, "1:5")):
        tokens = [99, 100, 101][:count]
        entries = [[-1.0, token, None] for token in tokens]
        meta = {"weight_version": label, "finish_reason": None, "output_token_logprobs": entries}
        sample.take({"output_ids": tokens, "meta_info": meta})
    assert sample.undelivered_tokens == 3
    sample.end("length")
    output = sample.undelivered()
    assert (output.tokens, output.versions, output.text) == ([99, 100, 101], [4, 5, 5], "abcde")
