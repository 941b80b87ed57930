"""The external engine against a real SGLang server on the CPU."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from relaxd.config import RolloutConfig
from relaxd.rpc.errors import Aborted, DeadlineExceeded, FailedPrecondition, InvalidArgument
from services.rollout.engines.request_types import Output, RequestFailed, Sampling, Version
from services.rollout.engines.sglang_external.external_engine import ExternalEngine
from services.rollout.engines.sglang_external.server_client import ServerGone, ServerMismatch, SGLangClient
from tests.integration.rollout.sglang_external.external_kit import (
    KEY,
    LONG,
    PROMPT,
    Engine,
    Server,
    Trainer,
    connect,
    logprobs,
)
from tests.kit.engines import PATIENCE, receive_request
from tests.kit.models import make_tiny_model
from tests.kit.waiting import eventually


@pytest.fixture
async def engine(server: Server, model: Path, trainer: Trainer) -> AsyncIterator[Engine]:
    engine = await connect(server, model)
    yield Engine(engine, trainer, model)
    await engine.stop()


async def test_samples_are_the_models_and_so_are_their_logprobs(engine: Engine) -> None:
    await engine.sync(1)
    reference = engine.reference(1)
    greedy = Sampling(max_new_tokens=12, temperature=0.0, ignore_eos=True)
    ((answer,),) = await engine.generate(sampling=greedy)
    expected = reference.generate(
        torch.tensor([PROMPT]), do_sample=False, max_new_tokens=12, min_new_tokens=12, eos_token_id=[]
    )
    assert answer.tokens == expected[0, len(PROMPT) :].tolist()
    assert torch.tensor(answer.logprobs).allclose(logprobs(reference, PROMPT, answer.tokens, 1.0), atol=1e-4)

    answers = await engine.generate(3, Sampling(max_new_tokens=40, temperature=0.7, ignore_eos=True))
    assert len({tuple(answer.tokens) for (answer,) in answers}) == 3
    for (answer,) in answers:
        assert torch.tensor(answer.logprobs).allclose(logprobs(reference, PROMPT, answer.tokens, 0.7), atol=1e-4)
        assert answer.versions == [1] * 40
        assert answer.finish_reason == "length"
        assert answer.text == AutoTokenizer.from_pretrained(engine.model).decode(answer.tokens)
        assert not answer.spans_weight_update


async def test_an_answer_ends_with_the_asked_for_token_which_its_text_leaves_out(engine: Engine) -> None:
    await engine.sync(1)
    ((long,),) = await engine.generate(sampling=Sampling(max_new_tokens=12, temperature=0.0, ignore_eos=True))
    end = long.tokens[5]
    stopping = Sampling(max_new_tokens=12, temperature=0.0, stop_token_ids=(end,))
    ((answer,),) = await engine.generate(sampling=stopping)
    assert answer.tokens == long.tokens[: long.tokens.index(end) + 1]
    assert answer.finish_reason == "stop"
    assert answer.text == AutoTokenizer.from_pretrained(engine.model).decode(answer.tokens[:-1])


async def test_a_server_without_a_tokenizer_takes_no_stop_strings(engine: Engine) -> None:
    await engine.sync(1)
    for sampling in (Sampling(max_new_tokens=3, stop=("a",)), Sampling(max_new_tokens=3, min_new_tokens=1)):
        with pytest.raises(InvalidArgument, match="--skip-tokenizer-init"):
            await engine.generate(sampling=sampling)


async def test_an_aborted_request_ends_with_what_it_has(engine: Engine, server: Server) -> None:
    await engine.sync(1)
    outputs: list[Output] = []
    async for output in engine.engine.generate(PROMPT, 2, LONG, stream=True, request_id="mine"):
        if not outputs:
            await engine.engine.abort("mine")
        outputs.append(output)
    assert [output.finish_reason for output in outputs].count("abort") == 2
    assert 0 < sum(len(output.tokens) for output in outputs) < 800
    await engine.engine.abort("mine")  # it has ended
    await until_none_runs(server)


async def test_a_long_prompt_is_computed_once_for_all_samples(engine: Engine) -> None:
    await engine.sync(1)
    prompt = tuple(3 + place % 250 for place in range(200))
    cached = []
    stream = engine.engine._client.stream

    async def listen(path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        async for event in stream(path, body):
            if event["meta_info"]["completion_tokens"]:
                cached.append(event["meta_info"]["cached_tokens"])
            yield event

    engine.engine._client.stream = listen  # type: ignore[method-assign]
    async for _ in engine.engine.generate(prompt, 4, Sampling(max_new_tokens=2, ignore_eos=True)):
        pass
    assert set(cached) == {199}  # the last token's logits are needed


async def test_a_streamed_answer_comes_token_by_token(engine: Engine) -> None:
    await engine.sync(1)
    sampling = Sampling(max_new_tokens=20, ignore_eos=True)
    for parts in await engine.generate(2, sampling, stream=True):
        assert len(parts) > 5  # those that are late share an event
        assert sum(len(part.tokens) for part in parts) == 20
        assert [part.finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1].text


async def test_bad_requests_are_refused_with_the_servers_reason(engine: Engine) -> None:
    await engine.sync(1)
    with pytest.raises(RequestFailed, match="temperature must be a non-negative"):
        await engine.generate(sampling=Sampling(max_new_tokens=3, temperature=-1))
    with pytest.raises(RequestFailed, match="context length"):
        async for _ in engine.engine.generate(PROMPT * 200, 1, LONG):
            pass
    assert len(await engine.generate(sampling=Sampling(max_new_tokens=3))) == 1


async def running_samples(server: Server) -> int:
    client = SGLangClient(server.url, KEY)
    loads = await client.call("/v1/loads", timeout=30)
    await client.close()
    return int(loads["loads"][0]["num_running_reqs"])


async def until_none_runs(server: Server) -> None:
    async def none_runs() -> bool:
        return await running_samples(server) == 0

    await eventually(none_runs, "no sample runs", PATIENCE)


async def test_leaving_an_answer_aborts_it(engine: Engine, server: Server) -> None:
    await engine.sync(1)
    started = time.monotonic()
    await engine.generate(2)
    whole = time.monotonic() - started
    async with aclosing(engine.engine.generate(PROMPT, 2, LONG, stream=True)) as outputs:  # type: ignore[type-var]
        async for output in outputs:
            assert output.tokens
            break
    left = asked = time.monotonic()
    while await running_samples(server):
        assert asked - left < whole / 2  # this process may have got no time since it asked
        await asyncio.sleep(0.02)
        asked = time.monotonic()


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_an_update_in_the_middle_leaves_every_token_with_its_version(engine: Engine, mode: str) -> None:
    await engine.sync(1)
    outputs: list[Output] = []
    begun = asyncio.Event()

    async def listen() -> None:
        async for output in engine.engine.generate(PROMPT, 1, LONG, stream=True):
            outputs.append(output)
            if sum(len(output.tokens) for output in outputs) >= 10:
                begun.set()

    listening = asyncio.create_task(listen())
    unstreamed = asyncio.create_task(engine.generate(2))
    await asyncio.wait_for(begun.wait(), PATIENCE)
    assert await engine.engine.pause(mode, 60, 30) == 3  # type: ignore[arg-type]
    await engine.join()
    await engine.transfer(2)
    before = sum(len(output.tokens) for output in outputs)
    await asyncio.sleep(0.2)
    assert sum(len(output.tokens) for output in outputs) == before, "a paused engine generates"
    late = asyncio.create_task(engine.generate(sampling=Sampling(max_new_tokens=3, ignore_eos=True)))
    await engine.engine.resume(Version(1, 2))
    await asyncio.wait_for(asyncio.gather(listening, unstreamed, late), PATIENCE)

    versions = [version for output in outputs for version in output.versions]
    assert versions == [1] * before + [2] * (400 - before)
    assert outputs[-1].spans_weight_update
    tokens = [token for output in outputs for token in output.tokens]
    found = torch.tensor([value for output in outputs for value in output.logprobs])
    old, new = (logprobs(engine.reference(version), PROMPT, tokens, 1.0) for version in (1, 2))
    assert found[:before].allclose(old[:before], atol=1e-4)
    assert not found[before:].allclose(old[before:], atol=1e-2)
    if mode == "retract":  # all but the prompt, which may still be in the prefix cache, is computed anew
        assert (found[before:] - new[before:]).abs().mean() < 0.2 * (found[before:] - old[before:]).abs().mean()
    for (answer,) in unstreamed.result():
        # Never younger than they are: those that came just after the update count as old, up to an event's worth. How
        # many are old, their log-probs tell: not as many as were streamed. The first new one may look old by chance.
        said = torch.tensor(answer.logprobs)
        unlike = (said - logprobs(engine.reference(1), PROMPT, answer.tokens, 1.0)).abs() > 1e-3
        written = int(unlike.int().argmax())
        assert answer.versions == sorted(answer.versions)
        assert written - 1 <= answer.versions.count(1) < written + 40
        assert answer.spans_weight_update
    ((fresh,),) = late.result()
    assert fresh.versions == [2, 2, 2]
    assert not fresh.spans_weight_update
    # Its prompt was in the prefix cache, as computed by the old weights.
    right = logprobs(engine.reference(2), PROMPT, fresh.tokens, 1.0)
    assert torch.tensor(fresh.logprobs).allclose(right, atol=1e-4)


async def test_an_aborting_pause_ends_requests_with_what_they_have(engine: Engine, server: Server) -> None:
    await engine.sync(1)
    begun = asyncio.Event()
    outputs: list[Output] = []

    async def listen() -> None:
        async for output in engine.engine.generate(PROMPT, 2, LONG, stream=True):
            outputs.append(output)
            begun.set()

    listening = asyncio.create_task(listen())
    await asyncio.wait_for(begun.wait(), PATIENCE)
    assert await engine.engine.pause("abort", 60, 30) == 0
    await asyncio.wait_for(listening, 30)  # the server is paused: nothing else ends them
    assert [output.finish_reason for output in outputs].count("abort") == 2
    late = asyncio.create_task(engine.generate(sampling=Sampling(max_new_tokens=3, ignore_eos=True)))
    await engine.join()
    await engine.transfer(2)
    await engine.engine.resume(Version(1, 2))
    assert [[output.versions for output in sample] for sample in await late] == [[[2, 2, 2]]]
    await until_none_runs(server)


async def test_a_draining_pause_waits_for_requests(engine: Engine, server: Server) -> None:
    await engine.sync(1)
    answering = asyncio.create_task(engine.generate(2))
    # Tokens stay; samples that run are gone after a second.
    await eventually(lambda: engine.engine.tokens, "the first tokens", PATIENCE)
    with pytest.raises(FailedPrecondition, match=r"did not end within 0\.02 s"):
        await engine.engine.pause("drain", 30, 0.02)
    pausing = asyncio.create_task(engine.engine.pause("drain", 60, PATIENCE))
    late = asyncio.create_task(engine.generate())
    assert await pausing == 0
    assert all(sample[-1].finish_reason == "length" for sample in await answering)
    assert not late.done()
    await engine.engine.resume()
    await late


async def test_a_pause_ends_by_itself(engine: Engine) -> None:
    await engine.sync(1)
    started = time.monotonic()  # before the lease begins
    await engine.engine.pause("in_place", 0.5, 10)
    await engine.generate(sampling=Sampling(max_new_tokens=1, ignore_eos=True))
    assert time.monotonic() - started > 0.49
    with pytest.raises(FailedPrecondition, match="not paused, or the lease"):
        await engine.engine.receive(receive_request(engine.group, Version(1, 2), 5))


async def test_weights_that_no_resume_names_serve_nothing(engine: Engine) -> None:
    await engine.sync(1)
    await engine.join()
    await engine.engine.pause("in_place", 1.0, 10)
    await engine.transfer(2)
    with pytest.raises(FailedPrecondition, match="doesn't name"):
        await engine.engine.resume()
    assert not engine.engine.quarantined
    await eventually(lambda: engine.engine.quarantined, "the lease ends")
    assert not engine.engine.serving
    late = asyncio.create_task(engine.generate(sampling=Sampling(max_new_tokens=3, ignore_eos=True)))
    await engine.sync(3)
    assert [[output.versions for output in sample] for sample in await late] == [[[3, 3, 3]]]


async def test_a_new_owner_ends_the_pause_of_one_that_died(server: Server, model: Path, trainer: Trainer) -> None:
    client = SGLangClient(server.url, KEY)
    await client.call("/pause_generation", {"mode": "in_place"}, timeout=30)
    engine = await connect(server, model)
    assert engine.weights is None
    tokens = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}}
    assert (await client.call("/generate", tokens, timeout=30))["output_ids"]
    await client.close()
    await engine.stop()


async def test_a_broken_update_quarantines_until_one_succeeds(engine: Engine) -> None:
    await engine.sync(1)
    await engine.engine.pause("in_place", 60, 10)
    await engine.join()
    receiving = asyncio.create_task(engine.engine.receive(receive_request(engine.group, Version(1, 2), 30)))
    await asyncio.to_thread(engine.trainer.broadcast, {}, buckets=2)
    assert engine.trainer.group is not None
    engine.trainer.group.abort()
    assert await engine.engine.leave(engine.group) or not receiving.done()
    with pytest.raises(Aborted):
        await receiving
    assert engine.engine.quarantined
    assert not engine.engine.serving
    await engine.engine.resume()
    waiting = asyncio.create_task(engine.generate(sampling=Sampling(max_new_tokens=3, ignore_eos=True)))
    await asyncio.sleep(0.3)
    assert not waiting.done(), "a quarantined engine generates"
    await engine.sync(3)
    assert engine.engine.serving
    ((answer,),) = await waiting
    assert answer.versions == [3, 3, 3]
    assert torch.tensor(answer.logprobs).allclose(logprobs(engine.reference(3), PROMPT, answer.tokens, 1.0), atol=1e-4)


async def test_a_trainer_that_does_not_come_costs_a_deadline_only(engine: Engine) -> None:
    await engine.sync(1)
    await engine.engine.pause("in_place", 30, 10)
    await engine.join()
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="did not end within 1 s: the server still waits for bucket 1 of"):
        await engine.engine.receive(receive_request(engine.group, Version(1, 2), 1.0))
    assert time.monotonic() - started < 15  # less than the group's 20
    assert engine.engine.quarantined
    assert engine.trainer.group is not None
    engine.trainer.group.abort()
    await engine.engine.leave(engine.group)
    await engine.sync(2)
    assert engine.engine.serving


async def test_a_manifest_that_stock_servers_cannot_follow_is_refused(engine: Engine, trainer: Trainer) -> None:
    trainer.manifest.buckets[1].source_rank = 1
    member = trainer.member("never", 5)
    trainer.manifest.buckets[1].source_rank = 0
    with pytest.raises(InvalidArgument, match="rank 0's only"):
        await engine.engine.join(member)


async def test_a_server_that_does_not_fit_is_refused(server: Server, model: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "llama", architecture="llama")
    with pytest.raises(ServerMismatch, match="is Qwen3ForCausalLM, the run's LlamaForCausalLM"):
        await connect(server, other)
    larger = tmp_path / "larger"
    larger.mkdir()
    for file in model.iterdir():
        text = file.read_bytes()
        (larger / file.name).write_bytes(text.replace(b'"vocab_size": 259', b'"vocab_size": 300'))
    with pytest.raises(ServerMismatch, match="has 259 token ids, the run's 300"):
        await connect(server, larger)
    with pytest.raises(ServerMismatch, match="tp_size is 1: it must be 2"):
        await connect(server, model, tensor_parallel=2)
    with pytest.raises(FailedPrecondition, match=r"401.*RELAXD_SGLANG_KEY"):
        await ExternalEngine.start(
            server.url, None, model, RolloutConfig(), on_exit=print, on_tokens=lambda count, per_second: None
        )


async def test_a_killed_server_is_noticed_and_waited_for(server: Server, model: Path, trainer: Trainer) -> None:
    exits: list[str] = []
    engine = Engine(await connect(server, model, exits), trainer, model)
    await engine.sync(1)
    answering = asyncio.create_task(engine.generate(8, stream=True))
    await eventually(lambda: engine.engine.tokens, "the first tokens", PATIENCE)
    server.kill()
    with pytest.raises(ServerGone, match=server.url):
        await asyncio.wait_for(answering, PATIENCE)
    assert exits
    assert server.url in exits[0]
    assert not engine.engine.alive
    assert engine.engine.weights is None
    await engine.engine.stop()

    connecting = asyncio.create_task(connect(server, model))
    server.start()
    engine.engine = await connecting
    assert engine.engine.weights is None
    with pytest.raises(RequestFailed, match="no weights"):
        await engine.generate()
    await engine.sync(2)
    ((answer,),) = await engine.generate(sampling=Sampling(max_new_tokens=5, ignore_eos=True))
    assert torch.tensor(answer.logprobs).allclose(logprobs(engine.reference(2), PROMPT, answer.tokens, 1.0), atol=1e-4)
    await engine.engine.stop()
