"""The scripted engine of a rehearsal: lengths, speeds, pauses and versions."""

import asyncio
import time

import numpy as np
import pytest

from relaxd.config import RehearsalConfig, RolloutConfig
from relaxd.v1 import replica_pb2, rollout_pb2
from relaxd.weights.receipts import Receipt, digest_of
from services.rollout.engines.request_types import EngineError, Output, Sampling, Version
from services.rollout.engines.scripted_engine import Decoder, ScriptedEngine, draw_lengths
from tests.kit.waiting import eventually


def test_lengths_are_log_normal_and_cut_off() -> None:
    config = RehearsalConfig(median_tokens=1000, spread=0.5)
    lengths = draw_lengths(config, 20_000, 2000, seed=1)
    assert np.median(lengths) == pytest.approx(1000, rel=0.03)
    assert (lengths == 2000).mean() == pytest.approx(0.083, abs=0.01)  # P(Z > ln 2 / 0.5)
    assert lengths.min() >= 1
    assert (lengths == draw_lengths(config, 20_000, 2000, seed=1)).all()


async def test_samples_share_the_speed() -> None:
    """1000 tokens/s for all, 400 for one: one alone takes 1 s for 400 tokens, four at once 250 tokens/s each."""
    now = 0.0
    decoder = Decoder(1000.0, 400.0, clock=lambda: now)
    alone = asyncio.create_task(decoder.decode(400))
    await asyncio.sleep(0)
    assert decoder.speed == 400
    now = 0.5  # it has 200 tokens
    others = [asyncio.create_task(decoder.decode(1000)) for _ in range(3)]
    await asyncio.sleep(0)
    assert decoder.speed == 250
    now = 1.3  # 200 more after 0.8 s
    decoder.pause(True)
    await asyncio.wait_for(alone, 1.0)
    assert decoder.running == 3
    now = 100.0
    assert decoder.speed == 0
    assert decoder.tokens == pytest.approx(200 + 4 * 200)
    others[0].cancel()
    await asyncio.gather(others[0], return_exceptions=True)
    assert decoder.running == 2
    for task in others:
        task.cancel()


async def test_an_engine_keeps_the_digests_of_its_newest_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.rollout.engines.engine_interface.DIGESTS_KEPT", 3)
    engine = ScriptedEngine(RolloutConfig(engine="scripted"), RehearsalConfig(median_tokens=5, spread=0.0))
    for version in (1, 2, 3, 1, 4):
        engine.take_up(Version(1, version), {"tensor": version}, resume=True)
    (output,) = [one async for one in engine.generate((1,), 1, Sampling(max_new_tokens=5)) if one.finish_reason]
    assert output.receipts == [Receipt(4, digest_of({"tensor": 4}), engine.name)]
    given = {version: digest for version, digest, _ in engine._receipts([1, 2, 3, 4])}
    assert given == {version: "" if version == 2 else digest_of({"tensor": version}) for version in (1, 2, 3, 4)}


async def test_an_answer_has_the_versions_that_it_met() -> None:
    rehearsal = RehearsalConfig(
        median_tokens=500, spread=0.0, tokens_per_second=1000, sample_tokens_per_second=1000, sync_seconds=0.05
    )
    engine = ScriptedEngine(RolloutConfig(engine="scripted"), rehearsal)

    def receive(version: int) -> rollout_pb2.ReceiveWeightsRequest:
        pause = rollout_pb2.PauseGenerationRequest(lease_seconds=10.0)
        weights = replica_pb2.WeightVersion(term=1, version=version)
        return rollout_pb2.ReceiveWeightsRequest(weights=weights, pause=pause, resume=True, checksum=True)

    assert dict((await engine.receive(receive(3))).checksums)
    assert engine.serving

    async def generate() -> list[Output]:
        return [output async for output in engine.generate((1, 2), 2, Sampling(max_new_tokens=512, seed=7))]

    began = time.monotonic()
    answers = asyncio.create_task(generate())
    while engine._decoder.position < 50:  # of 500, which take 0.5 s or longer
        await asyncio.sleep(0.01)
    await engine.receive(receive(4))
    for output in await answers:
        assert len(output.tokens) == len(output.logprobs) == len(output.versions) == 500
        assert (output.versions[0], output.versions[-1]) == (3, 4)
        assert np.all(np.diff(output.versions) >= 0)
        assert output.spans_weight_update
        assert output.finish_reason == "stop"
    assert time.monotonic() - began >= 0.5 + 0.05  # it rested while it received


async def test_weights_that_no_resume_names_serve_nothing() -> None:
    engine = ScriptedEngine(RolloutConfig(engine="scripted"), RehearsalConfig(median_tokens=3, sync_seconds=0.0))
    pause = rollout_pb2.PauseGenerationRequest(lease_seconds=0.1)
    request = rollout_pb2.ReceiveWeightsRequest(weights={"term": 1, "version": 3}, pause=pause)
    await engine.receive(request)
    await eventually(lambda: engine.quarantined, "the lease ends")
    assert not engine.serving
    request.pause.lease_seconds = 10.0
    await engine.receive(request)
    with pytest.raises(EngineError, match="doesn't name"):
        await engine.resume()
    await engine.resume(Version(1, 3))
    outputs = [output async for output in engine.generate((1,), 1, Sampling(max_new_tokens=3))]
    assert outputs[-1].finish_reason


async def test_aborted_answers_say_so() -> None:
    rehearsal = RehearsalConfig(median_tokens=100_000, spread=0.0, sync_seconds=0.0)
    engine = ScriptedEngine(RolloutConfig(engine="scripted"), rehearsal)
    requests = engine.generate((1,), 2, Sampling(max_new_tokens=200_000), request_id="one")
    first = asyncio.ensure_future(anext(requests))
    await asyncio.sleep(0.01)
    await engine.pause("abort", 10.0, 1.0)
    assert (await first).finish_reason == "abort"
    await engine.stop()


async def test_an_answer_that_is_continued_gets_the_length_that_it_would_have_had() -> None:
    rehearsal = RehearsalConfig(
        median_tokens=300, spread=0.3, tokens_per_second=8000, sample_tokens_per_second=2000, sync_seconds=0.0
    )
    config = RolloutConfig(engine="scripted", max_new_tokens=400)
    sampling, n = Sampling(max_new_tokens=400, seed=11), 4
    lengths = draw_lengths(rehearsal, n, 400, seed=11).tolist()
    got: list[list[int]] = [[] for _ in range(n)]
    finish: dict[int, str | None] = {}
    cuts = -1
    while True:  # cut off over and over
        cuts += 1
        begun = {index: tuple(tokens) for index, tokens in enumerate(got) if finish.get(index) in (None, "abort")}
        if not begun:
            break
        engine = ScriptedEngine(config, rehearsal)
        requests = engine.generate((1,), n, sampling, stream=True, report_every=16, begun=begun, request_id="one")
        asyncio.get_running_loop().call_later(0.03, lambda engine=engine: asyncio.ensure_future(engine.abort("one")))
        async for output in requests:
            got[output.sample] += list(output.tokens)
            assert len(output.tokens) == len(output.logprobs) == len(output.versions)
            if output.finish_reason:
                finish[output.sample] = output.finish_reason
    assert cuts > 2
    assert [len(tokens) for tokens in got] == lengths
    assert [finish[index] for index in range(n)] == ["length" if length == 400 else "stop" for length in lengths]
    assert all(tokens == got[lengths.index(max(lengths))][: len(tokens)] for tokens in got)
