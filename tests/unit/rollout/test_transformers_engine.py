"""The transformers engine beside transformers itself."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.rollout.engines.request_types import EngineError, Version
from services.rollout.engines.transformers.transformers_engine import TransformersEngine
from tests.kit.engines import check_likeliest
from tests.kit.models import make_tiny_model
from tests.kit.waiting import wait_until
from tests.unit.rollout.engine_harness import Answer, Harness, full_logprobs, load

PROMPTS = [[5, 9, 17, 200, 33], [7], [100, 101, 102], list(range(10, 60))]


@pytest.fixture(scope="module", params=["llama", "qwen3", "qwen3_5_text"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tied = request.param == "llama"
    return make_tiny_model(tmp_path_factory.mktemp(request.param), architecture=request.param, tied=tied)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("one"))


@pytest.fixture
def harness(llama: Path) -> Iterator[Harness]:
    harness = Harness(llama)
    yield harness
    harness.engine.stop()


def check_logprobs(model: object, prompt: list[int], answer: Answer, temperature: float = 1.0) -> None:
    expected = full_logprobs(model, prompt, answer.tokens, temperature)  # type: ignore[arg-type]
    assert torch.allclose(torch.tensor(answer.logprobs, dtype=torch.float64), expected, atol=1e-4)


def test_greedy_tokens_and_log_probs_equal_transformers(folder: Path) -> None:
    """Prompts of different lengths are put into one batch, leave it at different times, and others join it."""
    harness = Harness(folder)
    lengths = [24, 3, 12, 7]
    for number, (prompt, length) in enumerate(zip(PROMPTS, lengths, strict=True)):
        harness.submit(f"r{number}", prompt, temperature=0, max_new_tokens=length)
        if number == 1:
            harness.wait_for_tokens("r0", 5)  # the others join while it runs
    reference = load(folder)
    for number, (prompt, length) in enumerate(zip(PROMPTS, lengths, strict=True)):
        (answer,) = harness.wait(f"r{number}")
        expected = reference.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=length)  # type: ignore[operator]
        assert answer.tokens == expected[0, len(prompt) :].tolist()
        check_logprobs(reference, prompt, answer)
        assert answer.versions == [0] * len(answer.tokens)
    harness.engine.stop()


def test_sampled_log_probs_equal_a_full_forward_at_every_temperature(folder: Path) -> None:
    harness = Harness(folder)
    for number, (prompt, temperature) in enumerate(zip(PROMPTS, [1.0, 0.6, 1.7, 1.0], strict=True)):
        top = {"top_k": 20, "top_p": 0.9} if number == 3 else {}
        harness.submit(f"r{number}", prompt, 3, temperature=temperature, max_new_tokens=16, seed=number, **top)
    for number, (prompt, temperature) in enumerate(zip(PROMPTS, [1.0, 0.6, 1.7, 1.0], strict=True)):
        for answer in harness.wait(f"r{number}", 3):
            check_logprobs(harness.model, prompt, answer, temperature)
    harness.engine.stop()


def test_likeliest_tokens_are_those_of_a_full_forward_whatever_is_sampled(folder: Path) -> None:
    """Beside a request that asks for none, in one that asks for fewer, and in one that continues a sample."""
    harness = Harness(folder)
    asked = [(4, {"temperature": 1.7}), (0, {}), (2, {"temperature": 0.0}), (4, {"top_k": 2, "min_new_tokens": 12})]
    for number, (count, sampling) in enumerate(asked):
        begun = {0: (40, 41, 42)} if number == 2 else None
        harness.submit(
            f"r{number}", PROMPTS[0], report_every=3, max_new_tokens=16, likeliest=count, begun=begun, **sampling
        )
    for number, (count, _) in enumerate(asked):
        (answer,) = harness.wait(f"r{number}")
        begun_tokens = [40, 41, 42] if number == 2 else []
        if not count:
            assert answer.likeliest == []
            continue
        assert {len(ids) for ids in answer.likeliest} == {count}
        check_likeliest(harness.model, PROMPTS[0] + begun_tokens, answer.tokens, answer.likeliest)
    harness.submit("r9", PROMPTS[0], max_new_tokens=2, likeliest=259)
    (answer,) = harness.wait("r9")
    assert [sorted(ids) for ids in answer.likeliest] == [list(range(259))] * len(answer.tokens)
    with pytest.raises(EngineError, match="the 260 likeliest tokens are asked for, but there are 259"):
        harness.submit("r10", PROMPTS[0], max_new_tokens=2, likeliest=260)
    harness.engine.stop()


def test_samples_of_a_request_share_the_prefill(harness: Harness) -> None:
    fed: list[tuple[int, int]] = []
    harness.model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    harness.generate(PROMPTS[0], 6, max_new_tokens=3, ignore_eos=True)
    assert fed == [(1, 5), (6, 1), (6, 1)]
    stats = harness.engine.stats()
    assert (stats["tokens_prefilled"], stats["tokens_prompted"]) == (5, 30)


def test_ended_samples_leave_the_batch(harness: Harness) -> None:
    rows: list[int] = []
    harness.model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(kwargs["input_ids"].shape[0]), with_kwargs=True
    )
    answers = harness.generate(PROMPTS[3], 32, max_new_tokens=40, stop_token_ids=list(range(2, 40)))
    alive = [sum(len(answer.tokens) > step for answer in answers) for step in range(1, 40)]
    assert rows[1:] == [count for count in alive if count]
    assert len(set(alive)) > 5


def test_seeds_decide_and_neighbours_do_not(harness: Harness) -> None:
    wanted = {"max_new_tokens": 12, "seed": 41, "ignore_eos": True}
    alone = [answer.tokens for answer in harness.generate(PROMPTS[0], 4, **wanted)]
    assert len(set(map(tuple, alone))) == 4
    for number in range(5):
        harness.submit(f"other{number}", PROMPTS[number % 4], 3, max_new_tokens=20, seed=number)
    crowded = [answer.tokens for answer in harness.generate(PROMPTS[0], 4, **wanted)]
    assert crowded == alone
    assert [answer.tokens for answer in harness.generate(PROMPTS[0], 2, **wanted)] == alone[:2]
    assert [answer.tokens for answer in harness.generate(PROMPTS[0], 4, **{**wanted, "seed": 42})] != alone


def test_stop_conditions(harness: Harness) -> None:
    (free,) = harness.generate(PROMPTS[0], temperature=0, max_new_tokens=20, ignore_eos=True)
    assert free.last is not None
    assert (free.last.finish_reason, len(free.tokens)) == ("length", 20)
    assert free.last.text == " ".join(map(str, free.tokens))

    end = free.tokens[4]
    first = free.tokens.index(end)
    (stopped,) = harness.generate(PROMPTS[0], temperature=0, max_new_tokens=20, stop_token_ids=[end])
    assert stopped.last is not None
    assert stopped.tokens == free.tokens[: first + 1], "the ending token is kept"
    assert stopped.last.finish_reason == "stop"
    assert stopped.last.text == " ".join(map(str, free.tokens[:first])), "and stripped from the text"

    (forced,) = harness.generate(PROMPTS[0], temperature=0, max_new_tokens=20, stop_token_ids=[end], ignore_eos=True)
    assert forced.tokens == free.tokens

    own = Harness(Path(harness.model.name_or_path))
    own.engine._end_ids = frozenset({end})
    (ended,) = own.generate(PROMPTS[0], temperature=0, max_new_tokens=20)
    assert ended.tokens == stopped.tokens, "without given ids, the model's own end tokens count"
    own.engine.stop()


def test_without_streaming_a_sample_is_reported_once(harness: Harness) -> None:
    harness.submit("quiet", PROMPTS[0], 3, stream=False, max_new_tokens=9, ignore_eos=True)
    for answer in harness.wait("quiet", 3):
        assert (answer.outputs, len(answer.tokens)) == (1, 9)


def test_new_requests_do_not_wait_for_long_ones(harness: Harness) -> None:
    harness.submit("long", PROMPTS[0], 4, max_new_tokens=300, ignore_eos=True)
    harness.wait_for_tokens("long", 3)
    harness.submit("short", PROMPTS[1], max_new_tokens=5, ignore_eos=True)
    harness.wait("short")
    assert "long" not in harness.finish_order
    harness.engine.cancel("long")


def test_running_samples_are_limited(llama: Path) -> None:
    harness = Harness(llama, max_running_samples=4)
    rows: list[int] = []
    harness.model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(kwargs["input_ids"].shape[0]), with_kwargs=True
    )
    for number in range(3):
        harness.submit(f"r{number}", PROMPTS[number], 3, max_new_tokens=4, ignore_eos=True)
    harness.submit("large", PROMPTS[3], 10, max_new_tokens=4, ignore_eos=True)
    for number in range(3):
        harness.wait(f"r{number}", 3)
    assert len({tuple(answer.tokens) for answer in harness.wait("large", 10)}) == 10
    assert max(rows) == 4
    harness.engine.stop()


def changed_state(folder: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(99)
    return {name: tensor + torch.randn_like(tensor) * 0.05 for name, tensor in load(folder).state_dict().items()}


def test_an_update_in_the_middle_marks_and_changes_what_comes_after(harness: Harness, llama: Path) -> None:
    old = load(llama)
    tokens = 30
    for number in range(2):
        harness.submit(f"r{number}", PROMPTS[number], 2, max_new_tokens=tokens, ignore_eos=True, seed=number)
    harness.wait_for_tokens("r1", 8)
    held = harness.engine.pause("in_place", 60, 20)
    harness.submit("later", PROMPTS[2], max_new_tokens=6, ignore_eos=True)
    assert held == 4
    state = changed_state(llama)
    harness.update(Version(1, 1), state)
    before = {(r, s): len(a.tokens) for r in ("r0", "r1") for s, a in harness.answers[r].items()}
    time.sleep(0.05)
    assert before == {(r, s): len(a.tokens) for r in ("r0", "r1") for s, a in harness.answers[r].items()}
    harness.engine.gate.confirm(Version(1, 1))
    harness.engine.gate.resume()
    for number in range(2):
        for index, answer in enumerate(harness.wait(f"r{number}", 2)):
            cut = before[(f"r{number}", index)]
            assert answer.versions == [0] * cut + [1] * (tokens - cut)
            # With every output: whoever continues the sample where this engine dies has to know.
            assert answer.spans_weight_update == [False] * cut + [True] * (tokens - cut)
            # Before: the old weights. After: the new ones, over keys and values that the old ones made.
            prompt = PROMPTS[number]
            mixed = mixed_logprobs(old, harness.model, prompt, answer.tokens, cut)
            assert torch.allclose(torch.tensor(answer.logprobs, dtype=torch.float64), mixed, atol=1e-4)
            assert not torch.allclose(mixed[cut:], full_logprobs(old, prompt, answer.tokens)[cut:], atol=1e-3)
    (later,) = harness.wait("later")
    assert later.last is not None
    assert later.versions == [1] * 6
    assert not later.last.spans_weight_update
    check_logprobs(harness.model, PROMPTS[2], later)


def mixed_logprobs(old, new, prompt: list[int], tokens: list[int], cut: int) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """The same by transformers' own cache: the first `cut` tokens from the old model, the rest from the new one."""
    with torch.inference_mode():
        # The old model has fed all but the last of the first `cut` tokens; the new one feeds that and goes on.
        first = old(torch.tensor([prompt + tokens[: cut - 1]]), use_cache=True)
        second = new(torch.tensor([tokens[cut - 1 :]]), past_key_values=first.past_key_values)
    logits = torch.cat([first.logits[0, len(prompt) - 1 :], second.logits[0, :-1]]).double()
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None]).squeeze(-1)


def test_a_pause_by_abort_ends_everything_with_what_it_has(harness: Harness) -> None:
    harness.submit("running", PROMPTS[0], 2, max_new_tokens=400, ignore_eos=True)
    harness.wait_for_tokens("running", 3)
    assert harness.engine.pause("abort", 60, 20) == 0
    for answer in harness.wait("running", 2):
        assert answer.last is not None
        assert answer.last.finish_reason == "abort"
        assert 3 <= len(answer.tokens) < 400
    harness.engine.gate.resume()
    assert len(harness.generate(PROMPTS[1], max_new_tokens=3, ignore_eos=True)[0].tokens) == 3


def test_a_pause_by_drain_waits_for_the_running_and_keeps_the_waiting(harness: Harness) -> None:
    harness.submit("running", PROMPTS[0], max_new_tokens=40, ignore_eos=True)
    harness.wait_for_tokens("running", 3)
    harness.tick = lambda request_id: (
        harness.submit("waiting", PROMPTS[1], max_new_tokens=3, ignore_eos=True)
        if request_id == "running" and len(harness.answers["running"][0].tokens) == 20
        else None
    )
    held = harness.engine.pause("drain", 60, 20)
    (answer,) = harness.wait("running")
    assert len(answer.tokens) == 40
    assert held in (0, 1)
    assert harness.engine.stats()["running_samples"] == 0
    harness.engine.gate.resume()
    harness.wait("waiting")


def test_a_drain_that_takes_too_long_is_given_up(harness: Harness) -> None:
    harness.tick = lambda request_id: time.sleep(0.02)
    harness.submit("running", PROMPTS[0], max_new_tokens=100, ignore_eos=True)
    harness.wait_for_tokens("running", 3)
    with pytest.raises(EngineError, match="did not pause"):
        harness.engine.pause("drain", 60, 0.1)
    harness.tick = lambda request_id: None
    harness.wait("running")


def test_a_pause_ends_with_its_lease(harness: Harness) -> None:
    harness.submit("running", PROMPTS[0], max_new_tokens=60, ignore_eos=True)
    harness.wait_for_tokens("running", 3)
    started = time.monotonic()
    harness.engine.pause("in_place", 0.3, 20)
    harness.wait("running")
    assert time.monotonic() - started >= 0.3
    with pytest.raises(EngineError, match="not paused, or the lease"):
        harness.update(Version(1, 1))


def test_a_broken_update_quarantines_what_it_touched_and_only_that(harness: Harness, llama: Path) -> None:
    harness.submit("running", PROMPTS[0], max_new_tokens=60, ignore_eos=True)
    harness.wait_for_tokens("running", 3)

    harness.engine.pause("in_place", 60, 20)
    with pytest.raises(RuntimeError, match="broke"), harness.engine.update(Version(1, 1)):
        break_off()
    assert not harness.engine.gate.quarantined
    assert harness.engine.gate.weights == Version(1, 0)

    with pytest.raises(RuntimeError, match="broke"), harness.engine.update(Version(1, 1)):
        break_off(harness.engine)
    assert harness.engine.gate.quarantined
    harness.engine.gate.resume()
    before = len(harness.answers["running"][0].tokens)
    time.sleep(0.1)
    assert len(harness.answers["running"][0].tokens) == before, "a quarantined engine generates nothing"

    harness.set_weights(Version(1, 2), changed_state(llama))
    assert not harness.engine.gate.quarantined
    (answer,) = harness.wait("running")
    assert answer.versions == [0] * before + [2] * (60 - before)


def break_off(engine: TransformersEngine | None = None) -> None:
    if engine is not None:
        engine.gate.touch()
    raise RuntimeError("broke")


def test_a_lease_that_ends_during_an_update_waits_for_it(harness: Harness) -> None:
    harness.submit("running", PROMPTS[0], max_new_tokens=60, ignore_eos=True)
    harness.wait_for_tokens("running", 3)
    harness.engine.pause("in_place", 0.1, 20)
    with harness.engine.update(Version(1, 1)):
        harness.engine.gate.touch()
        before = len(harness.answers["running"][0].tokens)
        time.sleep(0.3)
        assert len(harness.answers["running"][0].tokens) == before
    wait_until(lambda: harness.engine.gate.quarantined, "the lease ends, and nobody has named the new weights")
    assert len(harness.answers["running"][0].tokens) == before


def test_nothing_is_served_before_the_first_weights(llama: Path) -> None:
    harness = Harness(llama, serve=False)
    harness.submit("early", PROMPTS[0], max_new_tokens=3, ignore_eos=True)
    time.sleep(0.1)
    assert not harness.answers["early"]
    harness.set_weights(Version(4, 9))
    assert harness.wait("early")[0].versions == [9, 9, 9]
    harness.engine.stop()


def test_a_cancelled_request_ends_quietly_and_frees_its_place(llama: Path) -> None:
    harness = Harness(llama, max_running_samples=2)
    harness.submit("running", PROMPTS[0], 2, max_new_tokens=400, ignore_eos=True)
    harness.submit("waiting", PROMPTS[1], 1, max_new_tokens=3, ignore_eos=True)
    harness.wait_for_tokens("running", 3)
    harness.engine.cancel("running")
    harness.wait("waiting")
    assert harness.engine.pause("in_place", 60, 20) == 0
    assert harness.answers["running"][0].last is None
    harness.engine.stop()


def test_a_failing_model_fails_its_requests_and_nothing_else(harness: Harness) -> None:
    harness.submit("first", PROMPTS[0], 2, max_new_tokens=200, ignore_eos=True)
    harness.wait_for_tokens("first", 2)
    handle = harness.model.register_forward_pre_hook(fail_at_prefill, with_kwargs=True)
    harness.submit("second", PROMPTS[1], max_new_tokens=5)
    with pytest.raises(AssertionError, match="ZeroDivisionError: broken on purpose"):
        harness.wait("second")
    handle.remove()
    assert all(len(answer.tokens) == 200 for answer in harness.wait("first", 2))
    with torch.no_grad():
        harness.model.get_input_embeddings().weight.fill_(torch.nan)
    harness.submit("third", PROMPTS[1], max_new_tokens=5)
    with pytest.raises(AssertionError, match="not finite"):
        harness.wait("third")


def fail_at_prefill(module: object, args: object, kwargs: dict) -> None:  # type: ignore[type-arg]
    if kwargs["past_key_values"].get_seq_length() == 0:
        raise ZeroDivisionError("broken on purpose")


def test_requests_from_many_threads(harness: Harness) -> None:
    def ask(number: int) -> None:
        for turn in range(3):
            name = f"{number}-{turn}"
            harness.submit(name, PROMPTS[number % 4], 2, stream=False, max_new_tokens=4, seed=number)
            answers.append([answer.tokens for answer in harness.wait(name, 2)])

    answers: list[list[list[int]]] = []
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(answers) == 24


def test_a_stop_string_ends_a_sample_and_its_text(harness: Harness) -> None:
    sampling = {"max_new_tokens": 30, "ignore_eos": True, "seed": 7}
    (free,) = harness.generate([5, 9, 17], **sampling)
    tokens = list(map(str, free.tokens))
    stop = f"{tokens[11]} {tokens[12]}"  # it lies in two tokens
    first = next(place for place in range(1, 30) if stop in " ".join(tokens[: place + 1]))
    (answer,) = harness.generate([5, 9, 17], stop=("no such text", stop), **sampling)
    assert answer.tokens == free.tokens[: first + 1]
    assert answer.last is not None
    assert answer.last.finish_reason == "stop"
    assert answer.last.text == "".join(f"{token} " for token in tokens[: first - 1])


def test_before_min_new_tokens_nothing_ends_a_sample_and_logprobs_stay_the_models(harness: Harness) -> None:
    (free,) = harness.generate([5, 9, 17], max_new_tokens=30, ignore_eos=True, temperature=0.0)
    end = free.tokens[3]
    sampling = {"max_new_tokens": 30, "temperature": 0.0, "stop_token_ids": (end,), "stop": (str(free.tokens[1]),)}
    (short,) = harness.generate([5, 9, 17], **sampling)
    assert len(short.tokens) <= 4
    (answer,) = harness.generate([5, 9, 17], min_new_tokens=10, **sampling)
    assert end not in answer.tokens[:9]
    assert len(answer.tokens) >= 10
    expected = full_logprobs(harness.model, [5, 9, 17], answer.tokens)
    torch.testing.assert_close(torch.tensor(answer.logprobs).double(), expected, atol=1e-4, rtol=0)


def test_an_aborted_request_ends_with_what_it_has_and_the_others_go_on(harness: Harness) -> None:
    harness.submit("ended", [5, 9], 2, max_new_tokens=400, ignore_eos=True)
    harness.submit("other", [7], 1, max_new_tokens=60, ignore_eos=True)
    harness.wait_for_tokens("ended", 3)
    harness.engine.abort("ended")
    for answer in harness.wait("ended", 2):
        assert answer.last is not None
        assert answer.last.finish_reason == "abort"
        assert 0 < len(answer.tokens) == len(answer.logprobs) < 400
    (other,) = harness.wait("other")
    assert len(other.tokens) == 60
    # In a pause as well, and one that has not begun.
    harness.engine.pause("in_place", 60, 20)
    harness.submit("waiting", [5], 1, max_new_tokens=5)
    harness.engine.abort("waiting")
    (waiting,) = harness.wait("waiting")
    assert (waiting.tokens, waiting.last and waiting.last.finish_reason) == ([], "abort")
    harness.engine.gate.resume()


def test_a_sample_that_is_continued_is_as_if_it_had_not_been_cut_off(folder: Path) -> None:
    """Tokens, log-probs, numbers drawn and the end: under the same weights nothing differs but what is reported."""
    harness = Harness(folder)
    sampling = {"max_new_tokens": 24, "seed": 3, "temperature": 1.3, "stop_token_ids": list(range(2, 22))}
    whole = harness.generate(PROMPTS[0], 8, **sampling)
    assert {answer.last.finish_reason for answer in whole if answer.last} == {"stop", "length"}
    cuts = {index: max(0, len(answer.tokens) - 1 - index) for index, answer in enumerate(whole) if index % 3}
    begun = {index: tuple(whole[index].tokens[:cut]) for index, cut in cuts.items()}
    assert any(begun.values())
    harness.submit("rest", PROMPTS[0], 8, begun=begun, **sampling)
    with harness._heard:
        assert harness._heard.wait_for(
            lambda: sum(answer.last is not None for answer in harness.answers["rest"].values()) == len(begun), 30
        )
    assert set(harness.answers["rest"]) == set(begun)
    for index, cut in cuts.items():
        rest, answer = harness.answers["rest"][index], whole[index]
        assert rest.tokens == answer.tokens[cut:]
        assert rest.logprobs == pytest.approx(answer.logprobs[cut:], abs=1e-4)
        assert len(rest.versions) == len(rest.tokens)
        assert rest.last is not None
        assert answer.last is not None
        assert (rest.last.finish_reason, rest.last.text) == (answer.last.finish_reason, answer.last.text)
        assert not rest.last.spans_weight_update
    harness.engine.stop()


def test_what_ends_a_continued_sample_counts_the_tokens_from_before(harness: Harness) -> None:
    sampling: dict[str, object] = {"max_new_tokens": 30, "ignore_eos": True, "seed": 7}
    (free,) = harness.generate([5, 9, 17], **sampling)
    tokens = list(map(str, free.tokens))
    stop = f"{tokens[11]} {tokens[12]}"  # it lies in two tokens, one from before and one that is new
    harness.submit("stop", [5, 9, 17], begun={0: tuple(free.tokens[:12])}, stop=(stop,), **sampling)
    (answer,) = harness.wait("stop")
    assert answer.tokens == free.tokens[12:13]
    assert answer.last is not None
    assert (answer.last.finish_reason, answer.last.text) == ("stop", "".join(f"{token} " for token in tokens[:11]))

    # An end token that comes too early is not chosen before min_new_tokens, tokens from before included.
    end = {**sampling, "ignore_eos": False, "stop_token_ids": (free.tokens[10],), "min_new_tokens": 15}
    harness.submit("least", [5, 9, 17], begun={0: tuple(free.tokens[:10])}, **end)
    (answer,) = harness.wait("least")
    assert free.tokens[10] not in answer.tokens[:4]
    assert 5 <= len(answer.tokens) <= 20


def test_tokens_are_reported_as_seldom_as_asked_for(harness: Harness) -> None:
    harness.submit("seldom", PROMPTS[0], 2, report_every=8, max_new_tokens=20, ignore_eos=True)
    for answer in harness.wait("seldom", 2):
        assert (answer.outputs, len(answer.tokens), len(answer.logprobs)) == (3, 20, 20)
