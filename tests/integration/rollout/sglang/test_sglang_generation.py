"""The rollout service's engine on the real SGLang: what it generates, and under which weights."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from relaxd.process.child import ChildExited
from relaxd.rpc.errors import Aborted, FailedPrecondition, InvalidArgument
from relaxd.v1 import rollout_pb2, weights_pb2
from services.rollout.engines.request_types import RequestFailed
from tests.integration.rollout.rollout_kit import Source
from tests.integration.rollout.sglang.syncs import check_logprobs, join, sync, transfer, with_weights
from tests.kit.engines import (
    EngineRunner,
    assert_gone,
    check_likeliest,
    family,
    receive_request,
    reference_logprobs,
)
from tests.kit.profiles import operations
from tests.kit.waiting import wait_until

SHORT = [5, 9, 17, 200, 33]
LONG = list(range(3, 103))
"""Long enough to be computed once for all samples."""
END = 2
VOCABULARY = 259
FAR = 300
"""Tokens that take some seconds."""


@pytest.fixture(scope="module")
def engine(start: Callable[..., EngineRunner], source: Source) -> EngineRunner:
    runner = start()
    assert runner.engine.weights is None
    assert (runner.engine.vocabulary, runner.engine.device) == (VOCABULARY, "cpu")
    sync(runner, source, 0)
    return runner


@pytest.fixture
def version(engine: EngineRunner) -> int:
    """What the engine serves."""
    assert engine.engine.weights is not None
    return engine.engine.weights.version


@pytest.mark.parametrize("prompt", [SHORT, LONG])
@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.6, "top_p": 0.8, "top_k": 20}]
)
def test_logprobs_are_those_of_transformers(
    engine: EngineRunner, model: Path, version: int, prompt: list[int], sampling: dict[str, float]
) -> None:
    temperature = sampling["temperature"]
    answers = engine.generate(prompt, 3, max_new_tokens=16, ignore_eos=True, **sampling)
    for answer in answers:
        assert (len(answer.tokens), answer.finish, answer.spans_weight_update) == (16, "length", False)
        assert answer.versions == [version] * 16
        check_logprobs(model, prompt, answer, temperature or 1.0)
    assert len({tuple(answer.tokens) for answer in answers}) == (3 if temperature else 1)


@pytest.mark.parametrize("prompt", [SHORT, LONG])
def test_likeliest_tokens_are_those_of_transformers_whatever_is_sampled(
    engine: EngineRunner, model: Path, version: int, prompt: list[int]
) -> None:
    """In one batch with requests that ask for others, for fewer or for none, whole and streamed."""
    wanted = [(5, True, 1.0), (0, False, 1.0), (2, False, 0.6)]
    asked = [
        engine.ask(
            prompt, 2, stream=stream, likeliest=count, max_new_tokens=16, ignore_eos=True, top_k=3, temperature=heat
        )
        for count, stream, heat in wanted
    ]
    for (count, _, _), one in zip(wanted, asked, strict=True):
        for answer in engine.wait(one):
            if not count:
                assert answer.likeliest == []
                continue
            assert [len(ids) for ids in answer.likeliest] == [count] * 16
            check_likeliest(with_weights(model, version), prompt, answer.tokens, answer.likeliest)


def test_answers_come_whole_unless_they_are_streamed(engine: EngineRunner, model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    (whole,) = engine.generate(SHORT, max_new_tokens=400, temperature=0.0, ignore_eos=True)
    (streamed,) = engine.generate(SHORT, stream=True, max_new_tokens=400, temperature=0.0, ignore_eos=True)
    assert whole.tokens == streamed.tokens
    assert whole.logprobs == pytest.approx(streamed.logprobs, abs=1e-6)
    assert whole.parts == 1
    assert 1 < streamed.parts <= 400
    for answer in (whole, streamed):
        assert answer.last is not None
        assert answer.last.text == tokenizer.decode(answer.tokens)


def test_what_ends_an_answer(engine: EngineRunner, model: Path) -> None:
    (free,) = engine.generate(SHORT, max_new_tokens=200, temperature=1.5, ignore_eos=True)
    assert len(free.tokens) == 200
    answers = engine.generate(SHORT, 8, max_new_tokens=400, temperature=1.5)
    ended = [answer for answer in answers if answer.finish == "stop"]
    assert ended, "none of 8 long random answers met the end token"
    for answer in ended:
        assert answer.tokens.index(END) == len(answer.tokens) - 1
        assert answer.last is not None
        assert answer.last.text == AutoTokenizer.from_pretrained(model).decode(answer.tokens[:-1])
    stops = tuple(range(40, 56))  # so many that one of them comes within 400 random tokens
    answers = engine.generate(SHORT, 8, max_new_tokens=400, temperature=1.5, stop_token_ids=stops)
    assert {answer.finish for answer in answers} == {"stop"}
    assert {answer.tokens[-1] for answer in answers} <= set(stops)
    # The model's own end token ends nothing when others are asked for. It comes once in 259 of these tokens.
    answers = engine.generate(SHORT, 16, max_new_tokens=400, temperature=1.5, stop_token_ids=(40,))
    assert any(END in answer.tokens for answer in answers)


def test_stop_strings_and_min_new_tokens(engine: EngineRunner, model: Path) -> None:
    decode = AutoTokenizer.from_pretrained(model).decode
    stops = [chr(letter) for letter in range(ord("A"), ord("A") + 16)]
    wanted = {"max_new_tokens": 400, "temperature": 1.5, "likeliest": 2}
    answers = engine.generate(SHORT, 8, ignore_eos=True, stop=tuple(stops), **wanted)
    for answer in answers:
        assert answer.finish == "stop"
        assert len(answer.likeliest) == len(answer.tokens)
        assert answer.last is not None
        text = decode(answer.tokens)
        assert text[-1] in stops
        assert answer.last.text == text[:-1]
        assert not set(stops) & set(answer.last.text)
    # The model's own end token is put off; the other requests in the batch are not.
    others = engine.ask(SHORT, 8, max_new_tokens=400, temperature=1.5)
    answers = engine.generate(SHORT, 8, min_new_tokens=300, **(wanted | {"likeliest": VOCABULARY}))
    assert all(END not in answer.tokens[:299] for answer in answers)
    # SGLang takes its probability from it, so that it is the least likely of all.
    assert all({ids[-1] for ids in answer.likeliest[:299]} == {END} for answer in answers)
    assert min(len(answer.tokens) for answer in answers) >= 300
    assert min(len(answer.tokens) for answer in engine.wait(others)) < 300


def test_an_aborted_request_ends_with_what_it_has(engine: EngineRunner) -> None:
    other = engine.ask(SHORT, max_new_tokens=FAR, ignore_eos=True)
    asked = engine.ask(LONG, 4, stream=True, likeliest=3, max_new_tokens=FAR, ignore_eos=True)
    engine.wait_begun(asked)
    engine.run(engine.engine.abort(asked.request_id))
    for answer in engine.wait(asked):
        assert answer.finish == "abort"
        assert len(answer.tokens) == len(answer.logprobs) == len(answer.likeliest) < FAR
    assert len(engine.wait(other)[0].tokens) == FAR
    # One that waits for the end of a pause ends at once.
    engine.pause()
    waiting = engine.ask(SHORT, 2, max_new_tokens=3)
    engine.run(engine.engine.abort(waiting.request_id))
    assert [answer.finish for answer in engine.wait(waiting)] == ["abort", "abort"]
    engine.resume()


def test_cancelled_requests_leave_the_engine(engine: EngineRunner) -> None:
    asked = engine.ask(LONG, 4, stream=True, max_new_tokens=FAR, ignore_eos=True)
    engine.wait_begun(asked)
    asked.task.cancel()
    engine.wait_until(lambda: engine.engine.gauges.get("running_samples") == 0)
    assert all(len(answer.tokens) < FAR for answer in asked.answers)


def test_a_request_that_cannot_be_served_fails_alone(engine: EngineRunner) -> None:
    good = engine.ask(SHORT, 2, max_new_tokens=50, ignore_eos=True)
    with pytest.raises(RequestFailed, match="exceeds the maximum allowed length"):
        engine.generate([7] * 600, max_new_tokens=5)
    assert [len(answer.tokens) for answer in engine.wait(good)] == [50, 50]


def test_an_update_between_tokens_that_keeps_the_cache(
    engine: EngineRunner, model: Path, source: Source, version: int
) -> None:
    whole = engine.ask(SHORT, 2, max_new_tokens=FAR, ignore_eos=True)
    asked = engine.ask(LONG, 4, stream=True, max_new_tokens=FAR, ignore_eos=True)
    engine.wait_begun(asked)  # and so the one that was sent before it
    assert sync(engine, source, version + 1) == 6
    answers = engine.wait(asked)
    for answer in answers + engine.wait(whole):
        assert set(answer.versions) == {version, version + 1}
        assert answer.versions == sorted(answer.versions)
        assert answer.spans_weight_update
        assert len(answer.tokens) == len(answer.logprobs) == FAR
        before = answer.versions.count(version)
        prompt = LONG if answer in answers else SHORT
        right = reference_logprobs(with_weights(model, version), prompt, answer.tokens[: before + 1])
        said = torch.tensor(answer.logprobs[: before + 1]).double()
        torch.testing.assert_close(said[:-1], right[:-1], atol=2e-5, rtol=0)
        assert abs(said[-1] - right[-1]) > 1e-4  # the first one of the new weights is not of the old ones
    # A request that begins with what they said finds nothing of theirs in the cache.
    prompt = LONG + answers[0].tokens[:100]
    (after,) = engine.generate(prompt, max_new_tokens=8, temperature=0.0, ignore_eos=True)
    assert (after.versions, after.spans_weight_update) == ([version + 1] * 8, False)
    check_logprobs(model, prompt, after)


def test_an_update_between_tokens_that_gives_the_cache_up(
    engine: EngineRunner, model: Path, source: Source, version: int
) -> None:
    asked = [
        engine.ask(SHORT, 2, stream=False, likeliest=3, max_new_tokens=FAR, ignore_eos=True),
        engine.ask(LONG, 4, stream=True, likeliest=3, max_new_tokens=FAR, ignore_eos=True),
    ]
    engine.wait_begun(asked[1])  # so the one before, which says nothing until its end, has begun, too
    assert sync(engine, source, version + 1, "retract") == 6
    for prompt, each in zip((SHORT, LONG), asked, strict=True):
        for answer in engine.wait(each):
            assert set(answer.versions) == {version, version + 1}
            assert not answer.spans_weight_update
            assert len(answer.tokens) == FAR
            check_logprobs(model, prompt, answer)  # which version made which token is right to the token
            before = answer.versions.count(version)
            for weights, own in ((version, slice(before)), (version + 1, slice(before, FAR))):
                begun = [*prompt, *answer.tokens[: own.start or 0]]
                check_likeliest(with_weights(model, weights), begun, answer.tokens[own], answer.likeliest[own])


def test_requests_that_wait_begin_under_the_new_weights(
    engine: EngineRunner, model: Path, source: Source, version: int
) -> None:
    running = [engine.ask(SHORT, 8, stream=True, max_new_tokens=FAR, ignore_eos=True) for _ in range(2)]
    engine.wait_begun(*running)
    waiting = engine.ask(LONG, 1, max_new_tokens=8, temperature=0.0, ignore_eos=True)  # SGLang takes 16 at once
    assert sync(engine, source, version + 1) == 17
    (answer,) = engine.wait(waiting)
    assert (answer.versions, answer.spans_weight_update) == ([version + 1] * 8, False)
    check_logprobs(model, LONG, answer)
    for each in running:
        assert all(answer.spans_weight_update for answer in engine.wait(each))


def test_abort_ends_requests_with_what_they_have(engine: EngineRunner, model: Path, source: Source) -> None:
    whole = engine.ask(SHORT, 2, max_new_tokens=FAR, ignore_eos=True)
    streamed = engine.ask(LONG, 4, stream=True, max_new_tokens=FAR, ignore_eos=True)
    engine.wait_begun(streamed)  # and so the one that was sent before it
    assert engine.pause("abort") == 0
    for prompt, each in ((LONG, streamed), (SHORT, whole)):
        for answer in engine.wait(each):
            assert answer.finish == "abort"
            assert 0 < len(answer.tokens) == len(answer.logprobs) == len(answer.versions) < FAR
            check_logprobs(model, prompt, answer)
    later = engine.ask(SHORT, 2, max_new_tokens=3, ignore_eos=True)
    engine.resume()
    assert [answer.finish for answer in engine.wait(later)] == ["length", "length"]


def test_drain_waits_for_what_has_begun(engine: EngineRunner, source: Source, version: int) -> None:
    asked = engine.ask(SHORT, 2, stream=True, max_new_tokens=150, ignore_eos=True)
    engine.wait_begun(asked)
    assert engine.pause("drain") == 0
    assert all(len(answer.tokens) == 150 for answer in engine.wait(asked))
    later = engine.ask(SHORT, max_new_tokens=3, ignore_eos=True)
    transfer(engine, source, join(engine, source), version + 1)
    engine.resume()
    assert engine.wait(later)[0].versions == [version + 1] * 3


def test_a_pause_ends_by_itself(engine: EngineRunner, source: Source) -> None:
    name = join(engine, source)
    started = time.monotonic()  # before the lease begins
    engine.pause("in_place", lease=0.5)
    engine.generate(SHORT, max_new_tokens=3, ignore_eos=True)
    assert 0.49 < time.monotonic() - started < 30
    with pytest.raises(FailedPrecondition, match="not paused"):
        engine.run(engine.engine.receive(receive_request(name, engine.next_version(), 5)))


def test_a_group_that_is_left_in_time_changes_nothing(engine: EngineRunner, source: Source, version: int) -> None:
    engine.pause()
    name = join(engine, source)
    begun = engine.begin(engine.engine.receive(receive_request(name, engine.next_version(), 20)))
    assert not engine.run(engine.engine.leave(name))
    with pytest.raises((Aborted, FailedPrecondition)):  # the second one if it overtook the reception
        engine.finish(begun)
    assert not engine.engine.quarantined
    engine.resume()
    (answer,) = engine.generate(SHORT, max_new_tokens=3, ignore_eos=True)
    assert answer.versions == [version] * 3


def test_weights_that_no_resume_names_are_given_up(engine: EngineRunner, source: Source, version: int) -> None:
    name = join(engine, source)
    engine.pause()
    transfer(engine, source, name, version + 1)
    with pytest.raises(FailedPrecondition, match="doesn't name"):
        engine.run(engine.engine.resume())
    assert engine.run(engine.engine.leave(name)), "it is quarantined"
    later = engine.ask(SHORT, max_new_tokens=3, ignore_eos=True)
    sync(engine, source, version + 2)
    assert engine.wait(later)[0].versions == [version + 2] * 3


def test_a_broadcast_that_breaks_halfway_quarantines(engine: EngineRunner, model: Path, source: Source) -> None:
    held = engine.ask(SHORT, 2, stream=True, max_new_tokens=FAR, ignore_eos=True)
    engine.wait_begun(held)
    engine.pause()
    name = join(engine, source)
    # So long that the source has sent two buckets by then; after it, the third has not come.
    begun = engine.begin(engine.engine.receive(receive_request(name, engine.next_version(), 6)))
    source.tell(do="broadcast", version=50, buckets=2)
    source.answer()
    with pytest.raises(Aborted):
        engine.finish(begun)
    assert engine.run(engine.engine.leave(name))
    assert engine.engine.quarantined
    assert not engine.engine.serving
    transfer(engine, source, join(engine, source), 51)
    engine.resume()
    assert engine.engine.serving
    assert all(answer.versions[-1] == 51 for answer in engine.wait(held))
    (answer,) = engine.generate(LONG, max_new_tokens=8, temperature=0.0, ignore_eos=True)
    check_logprobs(model, LONG, answer)


def test_a_manifest_that_does_not_fit_is_refused(engine: EngineRunner, source: Source) -> None:
    wrong = weights_pb2.WeightManifest.FromString(source.manifest.SerializeToString())
    wrong.buckets[0].tensors[0].name = "model.no_such.weight"
    with pytest.raises(InvalidArgument, match=r"model\.no_such\.weight"):
        engine.join("wrong", source.port, wrong)
    assert engine.generate(SHORT, max_new_tokens=2)[0].tokens


def test_the_next_steps_are_recorded(engine: EngineRunner, tmp_path: Path) -> None:
    def record() -> list[Path]:
        request = rollout_pb2.ProfileRequest(steps=3)
        return [Path(path) for path in engine.run(engine.engine.record(request, tmp_path, "engine-1"))]

    (path,) = record()
    assert path == tmp_path / "engine-1-TP-0.trace.json.gz"
    with pytest.raises(FailedPrecondition, match="is recording steps already"):
        record()
    engine.generate(SHORT, max_new_tokens=8, ignore_eos=True)
    wait_until(path.exists)
    assert operations(path)["aten::embedding"] == 3
    path.unlink()
    assert record() == [path], "it has ended, whatever became of its file"


def test_all_processes_end_with_the_engine_that_is_killed(engine: EngineRunner) -> None:
    asked = engine.ask(SHORT, 2, stream=True, max_new_tokens=FAR, ignore_eos=True)
    engine.wait_begun(asked)
    processes = family(engine.engine.pid)
    assert len(processes) > 1
    os.kill(engine.engine.pid, signal.SIGKILL)
    assert engine.wait_exit().exit_code == -signal.SIGKILL
    with pytest.raises(ChildExited):
        engine.wait(asked)
    assert_gone(processes)
