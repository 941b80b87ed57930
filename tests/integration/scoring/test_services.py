"""The reward and advantage services as real processes: calls, stages, ends and restarts."""

import json
import math
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import redis
from PIL import Image

from relaxd.media.images import ImageRule, normalise_image
from relaxd.media.messages import to_proto
from relaxd.media.prompt_media import PromptMedia, with_references
from relaxd.redis_client import key_prefix
from relaxd.rewards import REWARDS
from relaxd.rewards.interface import text_message
from relaxd.rpc.errors import field_violations
from relaxd.v1.advantage_pb2 import ComputeRequest
from relaxd.v1.advantage_pb2_grpc import AdvantageStub
from relaxd.v1.content_pb2 import Conversation
from relaxd.v1.coordinator_pb2 import RUN_STATE_PAUSED
from relaxd.v1.group_pb2 import DROP_REASON_UNSPECIFIED, DROP_REASON_ZERO_VARIANCE
from relaxd.v1.remote_reward_pb2 import AnswerScore, ScoreAnswersResponse
from relaxd.v1.remote_reward_pb2_grpc import RemoteRewardServicer, add_RemoteRewardServicer_to_server
from relaxd.v1.replica_pb2 import REPLICA_WAIT_SERVICE
from relaxd.v1.reward_pb2 import ListRewardsRequest, ScoreRequest
from relaxd.v1.reward_pb2_grpc import RewardStub
from relaxd.v1.sample_pb2 import FinishReason
from tests.integration.scoring.processes import Bench, bench, run_config
from tests.kit.ports import free_port
from tests.kit.processes import is_alive, run_python
from tests.kit.vision import encoded
from tests.kit.waiting import eventually

BAD = "bad_rewards:by_response"


@pytest.fixture
async def here(tmp_path: Path, redis_url: str) -> AsyncIterator[Bench]:
    async with bench(tmp_path, redis_url) as made:
        yield made


def score_request(reward: str, responses: list[str], answer: str = "", **fields: Any) -> ScoreRequest:
    conversations = [Conversation(messages=to_proto([text_message("assistant", text)])) for text in responses]
    reference = to_proto([text_message("", answer)])
    return ScoreRequest(reward=reward, answer=reference, responses=conversations, **fields)


async def violations(call) -> dict[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    return dict(field_violations(caught.value))


# --- calls --------------------------------------------------------------------------------------------------------


async def test_the_reward_calls(here, monkeypatch):
    monkeypatch.setenv("RELAXD_ALLOWED_REWARDS", f"{BAD}, absent:f")
    async with here.service("reward", "reward-1") as process:
        stub = RewardStub(process.to)
        await here.coordinator.hears("reward-1", "IDLE")
        infos = (await stub.ListRewards(ListRewardsRequest())).rewards
        assert [info.name for info in infos] == sorted(REWARDS)
        assert all(info.description for info in infos)

        request = score_request("addition", ["It is 46", "47"], answer="46")
        scores = (await stub.Score(request)).scores
        assert [(s.reward, dict(s.parts), s.error) for s in scores] == [
            (1.0, {"accuracy": 1.0, "format": 0.0}, ""),
            (0.0, {"accuracy": 0.0, "format": 1.0}, ""),
        ]
        request = score_request(BAD, ["one", "nan", "none", "raise 1", "os._exit"])
        scores = (await stub.Score(request)).scores
        assert scores[0].reward == 1.0
        assert not scores[0].error
        assert all(score.error and score.reward == 0.0 for score in scores[1:])
        request = score_request("addition", ["2"], answer="two")
        assert "needs a number" in (await stub.Score(request)).scores[0].error

        reasons = [FinishReason.FINISH_REASON_STOP, 77]
        bad = ScoreRequest(reward="additon", metadata_json="[1]", finish_reasons=reasons, response_tokens=[1])
        found = await violations(stub.Score(bad))
        wrong = {"reward", "responses", "finish_reasons", "finish_reasons[1]", "metadata_json", "response_tokens"}
        assert set(found) == wrong
        assert "has no run, so name one" in (await violations(stub.Score(score_request("", ["1"]))))["reward"]
        assert "did you mean addition?" in found["reward"]
        found = await violations(stub.Score(score_request("absent:f", ["1"], metadata_json="{")))
        assert "is not JSON" in found["metadata_json"]
        found = await violations(stub.Score(score_request("absent:f", ["1"])))
        assert "No module named 'absent'" in found["reward"]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Score(score_request("os:getcwd", ["1"]))
        assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED
        assert 'reward "os:getcwd" is not allowed' in caught.value.details()
        assert "--allowed-rewards" in caught.value.details()


async def test_rewards_see_messages_and_media(here, monkeypatch, tmp_path):
    monkeypatch.setenv("RELAXD_ALLOWED_REWARDS", BAD)
    cat = {"type": "image", "uri": "file:///cat.png", "media_type": "image/png", "sha256": "ab" * 32}
    parts = [{"type": "text", "text": "What is this?"}, cat]
    path = tmp_path / "messages"
    here.start_run(run_config())
    async with here.service("reward", "reward-1") as process:
        stub = RewardStub(process.to)
        await here.coordinator.hears("reward-1", "READY")
        request = score_request(BAD, [f"messages {path}"])
        request.prompt.extend(to_proto([{"role": "system", "content": "Be kind."}, {"role": "user", "content": parts}]))
        assert (await stub.Score(request)).scores[0].reward == 1.0
        assert json.loads(path.read_text()) == [
            text_message("system", "Be kind."),
            {"role": "user", "content": parts},
            text_message("assistant", f"messages {path}"),
        ]
        request.prompt[0].content[0].ClearField("text")
        request.prompt[1].content[1].image.uri = ""
        request.prompt[1].content[1].image.sha256 = b"short"
        assert await violations(stub.Score(request)) == {
            "prompt[0].content[0]": "is empty: give text, image, audio or video",
            "prompt[1].content[1].image.uri": "is empty: media are given by reference",
            "prompt[1].content[1].image.sha256": "has 5 bytes: give 32, or none",
        }


async def test_rewards_open_images(here):
    """Of the stage's groups, and of Score's requests."""
    rule = ImageRule(16, 2, 32 * 32, 64 * 64)
    images = [normalise_image(encoded(Image.new("RGB", (64, 64), (red, 0, 0))), rule) for red in (30, 200, 30)]
    sees = {"data": {"media_keys": {"image": "images"}}, "rollout": {"engine": "transformers"}}
    here.start_run(run_config(reward={"name": "bad_rewards:redness", "media": True}, **sees))
    async with here.service("reward", "reward-1") as process, here.service("advantage", "advantage-1"):
        await here.coordinator.hears("reward-1", "READY")
        (group,) = here.generate(["one", "two"], images=images)
        assert await here.dropped(1) == {group: "zero_variance"}
        request = score_request("", ["one"])
        asked = [{"role": "user", "content": [{"type": "image"}] * 3}]
        request.prompt.extend(to_proto(with_references(asked, images)))
        lacking = (await RewardStub(process.to).Score(request)).scores[0].error
        assert f"image {images[0].sha256} isn't here: set reward.media = true" in lacking
        for name, content in PromptMedia.of(images).by_hash().items():
            request.media[name] = content
        assert (await RewardStub(process.to).Score(request)).scores[0].reward == 260


async def test_the_reward_of_the_run_may_be_asked_for(here):
    async with here.service("reward", "reward-1") as process:
        here.start_run(run_config(reward={"name": BAD}))
        await here.coordinator.hears("reward-1", "READY")
        stub = RewardStub(process.to)
        assert (await stub.Score(score_request(BAD, ["one"]))).scores[0].reward == 1.0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Score(score_request("bad_rewards:other", ["1"]))
        assert f"that of the run ({BAD})" in caught.value.details()
        assert process.log.count("reward workers are limited in ") == 1


async def test_the_advantage_call(here):
    async with here.service("advantage", "advantage-1") as process:
        stub = AdvantageStub(process.to)
        await here.coordinator.hears("advantage-1", "IDLE")

        def compute(rewards, lengths, **settings):
            return stub.Compute(ComputeRequest(algorithm_json=json.dumps(settings), rewards=rewards, lengths=lengths))

        response = await compute([0.0, 1.0, 0.0], [2, 0, 1], name="grpo", std_epsilon=1e-9)
        expected = -1 / 3 / math.sqrt(1 / 3)
        assert [list(sample.values) for sample in response.advantages] == [
            pytest.approx([expected] * 2),
            [],
            pytest.approx([expected]),
        ]
        assert response.drop_reason == DROP_REASON_UNSPECIFIED
        response = await compute([0.1 + 0.2] * 7, [1] * 7)
        assert (list(response.advantages), response.drop_reason) == ([], DROP_REASON_ZERO_VARIANCE)

        assert "did you mean 'grpo'" in (await violations(compute([1, 0], [1, 1], name="gpro")))["algorithm_json"]
        found = await violations(compute([1, 0], [1, 1], clip_hihg=0.3))
        assert "did you mean algorithm.clip_high?" in found["algorithm_json"]
        found = await violations(compute([1, math.nan], [1, -1, 1]))
        assert set(found) == {"rewards[1]", "lengths", "lengths[1]"}
        assert set(await violations(compute([], []))) == {"rewards"}
        assert set(await violations(compute([1, 0], [2**30, 2**30]))) == {"lengths"}
        found = await violations(compute([1e300, -1e300], [1, 1], normalize_std=False))
        assert "not overflow float32" in found["rewards"]
        assert set(await violations(stub.Compute(ComputeRequest(rewards=[1], lengths=[1])))) == {"algorithm_json"}


# --- stages -------------------------------------------------------------------------------------------------------


async def test_the_stages_score_and_drop(here):
    """Good groups arrive at the trainer as the formulas want them; not one with a made-up reward."""
    here.start_run(run_config(reward={"timeout_seconds": 3.0}))
    async with here.service("reward", "reward-1"), here.service("advantage", "advantage-1"):
        bad = ["raise 1", "nan", "inf", "string", "none", "hang", "hang-in-c", "os._exit", "abort", "sys.exit"]
        failing = here.generate(*[["one", "parts", response] for response in bad])
        good = here.generate(["parts", "one", "parts"], ["parts", "parts"], ["shout", "parts"])
        columns = await here.trained(2)
        assert await here.dropped(11) == {**dict.fromkeys(failing, "reward_failed"), good[1]: "zero_variance"}
        details = {group.group_id: group.detail for group in here.board.dropped()}
        assert details[failing[0]].startswith(f"{BAD}: IndexError: list index out of range (tests/")
        assert details[failing[5]].startswith(f"{BAD}: scoring a sample took longer than 3 s (at tests/")
        assert details[good[1]] == ""
    assert set(columns) == {good[0], good[2]}
    first = columns[good[0]]
    np.testing.assert_array_equal(first["reward"], [0.5, 1.0, 0.5])
    assert first["reward"].dtype == np.float64
    (part,) = first["reward_parts"].values()
    assert [value is None for value in part] == [False, True, False]  # the second sample has none
    per_sample = (np.array([0.5, 1, 0.5]) - 2 / 3) / (np.std([0.5, 1, 0.5], ddof=1) + 1e-6)
    np.testing.assert_allclose(first["advantages"], np.repeat(per_sample, [1, 2, 3]), rtol=1e-6)
    assert first["advantages"].dtype == np.float32
    assert here.board.counts().dropped_by_reason == {"reward_failed": 10, "zero_variance": 1}


async def test_a_reward_of_groups_with_settings_whose_failures_count_as_zero(here):
    ranked = {"name": "bad_rewards:Ranked", "settings": {"step": 10}, "on_failure": "zero"}
    here.start_run(run_config(reward=ranked))
    async with here.service("reward", "reward-1") as process, here.service("advantage", "advantage-1"):
        await here.coordinator.hears("reward-1", "READY")
        good, failed = here.generate(["b", "a", "c"], ["b", "raise", "c"])
        columns = await here.trained(1)
        assert await here.dropped(1) == {failed: "zero_variance"}
        np.testing.assert_array_equal(columns[good]["reward"], [10, 0, 20])
        assert columns[good]["reward_parts"] == {"failed": [0, 0, 0], "tokens": [1, 2, 3]}
        # The run's reward by an empty name, with its settings; by its name alone it lacks one.
        request = score_request("", ["y", "x"], response_tokens=[5, 6])
        scores = (await RewardStub(process.to).Score(request)).scores
        assert [(one.reward, dict(one.parts)) for one in scores] == [(10, {"tokens": 5}), (0, {"tokens": 6})]
        found = await violations(RewardStub(process.to).Score(score_request("bad_rewards:Ranked", ["x"])))
        assert "reward.settings.step is missing" in found["reward"]
    assert "failed for 3 of 3 samples" in process.log


async def test_a_run_waits_for_its_reward_service_and_says_so(here):
    port = free_port()
    address = f"127.0.0.1:{port}"
    here.start_run(run_config(reward={"name": "", "address": address, "cache_samples": 100, "timeout_seconds": 60.0}))
    async with here.service("reward", "reward-1") as process, here.service("advantage", "advantage-1"):
        ids = here.generate(["one", "three"], ["three", "one"])
        await here.coordinator.hears("reward-1", "READY", held_groups=2)
        said = f"the reward service at {address} does not answer"
        await eventually(lambda: said in here.coordinator.statuses["reward-1"].detail, said)
        assert here.coordinator.statuses["reward-1"].wait == REPLICA_WAIT_SERVICE
        server = grpc.aio.server()
        add_RemoteRewardServicer_to_server(LengthJudge(), server)
        server.add_insecure_port(address)
        await server.start()
        columns = await here.trained(2)
        assert [columns[one]["reward"].tolist() for one in ids] == [[3.0, 5.0], [5.0, 3.0]]
        assert here.board.counts().dropped == 0
        (score,) = (await RewardStub(process.to).Score(score_request("", ["three"], answer="5"))).scores
        assert score.reward == 5.0
        await server.stop(0)


async def test_a_term_at_an_address_is_added_to_those_of_workers(here):
    server = grpc.aio.server()
    add_RemoteRewardServicer_to_server(LengthJudge(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    terms = [{"address": address, "label": "long", "weight": 0.1}, {"name": BAD, "label": "said"}]
    here.start_run(run_config(reward={"name": "", "terms": terms}))
    async with here.service("reward", "reward-1") as process, here.service("advantage", "advantage-1"):
        good, failed = here.generate(["one", "parts"], ["one", "raise 1"])
        columns = await here.trained(1)
        np.testing.assert_allclose(columns[good]["reward"], [0.3 + 1, 0.5 + 0.5])
        assert columns[good]["reward_parts"]["long"] == [3, 5]
        assert await here.dropped(1) == {failed: "reward_failed"}
        (score,) = (await RewardStub(process.to).Score(score_request("", ["one"]))).scores
        assert score.reward == pytest.approx(1.3)
    await server.stop(0)


async def test_evaluation_sets_have_rewards_with_settings_of_their_own(here, monkeypatch, tmp_path):
    server = grpc.aio.server()
    add_RemoteRewardServicer_to_server(LengthJudge(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    ranked = {"reward": "bad_rewards:Ranked", "reward_settings": {"step": 3}}
    sets = [
        {"name": "ranked", "path": "a.jsonl", **ranked},
        {"name": "by-key", "path": "a.jsonl", **ranked, "reward_key": "tokens"},
        {"name": "remote", "path": "a.jsonl", "reward_address": address},
        {"name": "runs", "path": "a.jsonl"},
    ]
    here.start_run(run_config(reward={"name": "bad_rewards:Ranked", "settings": {"step": 10}}, eval={"sets": sets}))
    async with here.service("reward", "reward-1") as process:
        await here.coordinator.hears("reward-1", "READY")
        stub = RewardStub(process.to)

        async def scores(name: str) -> list[float]:
            request = score_request("", ["y", "xyz"], response_tokens=[5, 6], evaluation_set=name)
            return [score.reward for score in (await stub.Score(request)).scores]

        assert await scores("") == [10, 0]
        assert await scores("ranked") == [3, 0]
        assert await scores("by-key") == [5, 6]
        assert await scores("remote") == [1, 3]
        found = await violations(stub.Score(score_request("", ["x"], evaluation_set="runs")))
        assert (
            "is 'runs': it must be a set of the run with a reward of its own; there are by-key, ranked"
            in (found["evaluation_set"])
        )
        found = await violations(stub.Score(score_request("math", ["x"], evaluation_set="ranked")))
        assert "give one of them" in found["evaluation_set"]
        broken = {"name": "broken", "path": "a.jsonl", "reward": "bad_rewards:Ranked"}
        here.coordinator.assign(run_config(eval={"sets": [broken]}), "other")
        status = await here.coordinator.hears("reward-1", "FAILED")
        assert "the evaluation set broken: " in status.detail
        assert "reward.settings.step is missing" in status.detail
    await server.stop(0)


class LengthJudge(RemoteRewardServicer):
    async def ScoreAnswers(self, request, context):
        return ScoreAnswersResponse(scores=[AnswerScore(reward=len(answer.text)) for answer in request.answers])


@pytest.mark.slow
async def test_a_cache_is_refused_for_a_reward_of_groups(here):
    ranked = {"name": "bad_rewards:Ranked", "settings": {"step": 10}, "cache_samples": 10}
    here.start_run(run_config(reward=ranked))
    async with here.service("reward", "reward-1"):
        status = await here.coordinator.hears("reward-1", "FAILED")
        assert "reward.cache_samples is 10, but bad_rewards:Ranked scores groups" in status.detail


async def test_failed_samples_are_scored_again(here, tmp_path):
    here.start_run(run_config(reward={"name": "bad_rewards:at_second", "on_failure": "retry", "max_retries": 1}))
    async with here.service("reward", "reward-1"), here.service("advantage", "advantage-1"):
        good, failed = here.generate(["right", f"wrong {tmp_path / 'once'}", "right"], ["right", "never"])
        columns = await here.trained(1)
        np.testing.assert_array_equal(columns[good]["reward"], [1, 0, 1])
        assert await here.dropped(1) == {failed: "reward_failed"}


async def test_a_run_whose_reward_does_not_exist_says_so(here):
    here.start_run(run_config(reward={"name": "additon"}))
    async with here.service("reward", "reward-1"):
        status = await here.coordinator.hears("reward-1", "FAILED")
        assert "did you mean addition?" in status.detail
        here.coordinator.assign(run_config(reward={"name": "bad_rewards:by_respnse"}), "other")
        detail = lambda: here.coordinator.statuses["reward-1"].detail  # noqa: E731
        await eventually(lambda: "did you mean by_response?" in detail(), "the name that was meant")


async def test_a_run_whose_reward_wants_a_variable_that_is_not_set_says_so(here, monkeypatch, tmp_path):
    monkeypatch.setenv("JUDGE_KEY", "k")
    here.start_run(run_config(reward={"environment": ["JUDGE_KEY", "OTHER_KEY"]}))
    async with here.service("reward", "reward-1") as process:
        status = await here.coordinator.hears("reward-1", "FAILED")
        assert "reward.environment names OTHER_KEY, not set in the reward service's environment" in status.detail
        here.coordinator.assign(run_config(reward={"environment": ["JUDGE_KEY"]}), "other")
        await here.coordinator.hears("reward-1", "READY")
        request = score_request(BAD, [f"surroundings {tmp_path / 'seen'}"])
        assert (await RewardStub(process.to).Score(request)).scores[0].reward == 1.0
    assert json.loads((tmp_path / "seen").read_text())["environment"]["JUDGE_KEY"] == "k"


async def test_a_resumed_run_loads_its_reward_again(here):
    config = run_config(reward={"workers": 1})
    here.start_run(config)
    async with here.service("reward", "reward-1") as process:
        await here.coordinator.hears("reward-1", "READY")

        async def worker() -> float:
            return (await RewardStub(process.to).Score(score_request(BAD, ["pid"]))).scores[0].reward

        first = await worker()
        assert await worker() == first
        here.coordinator.assign(config, state=RUN_STATE_PAUSED)
        for _ in range(3):  # the answer to the first tells the replica
            async with here.coordinator.heard:
                await here.coordinator.heard.wait()
        assert await worker() == first
        here.coordinator.assign(config)

        async def is_another() -> bool:
            return await worker() != first

        await eventually(is_another, "another worker answers")


# --- ends and restarts --------------------------------------------------------------------------------------------


async def test_sigterm_finishes_what_can_be_finished(here, tmp_path):
    here.start_run(run_config(reward={"timeout_seconds": 60}))
    flag = tmp_path / "flag"
    async with here.service("reward", "reward-1", grace_seconds=60) as process:
        await here.coordinator.hears("reward-1", "READY")
        here.generate([f"wait-for {flag}", "one"])
        await here.coordinator.hears("reward-1", "READY", held_groups=1)
        process.process.send_signal(signal.SIGTERM)
        await here.coordinator.hears("reward-1", "DRAINING")
        flag.touch()
        assert await process.ended() == 0
    (depth,) = [queue for queue in here.board.queues() if queue.stage == "advantage"]
    assert depth.waiting == 1
    assert "Traceback" not in process.log


async def test_sigterm_hands_back_what_cannot_and_the_next_process_does_it(here, tmp_path):
    here.start_run(run_config(reward={"timeout_seconds": 600}, board={"lease_seconds": 600}))
    flag = tmp_path / "flag"
    async with here.service("reward", "reward-1", grace_seconds=1) as process:
        await here.coordinator.hears("reward-1", "READY")
        (group,) = here.generate(["one", f"hang-unless {flag}"])
        await here.coordinator.hears("reward-1", "READY", held_groups=1)
        assert await process.ends(signal.SIGTERM) == 0
    assert "Traceback" not in process.log
    flag.touch()
    # Handed back, not left to its lease of ten minutes; and the name may be used again.
    async with here.service("reward", "reward-1"), here.service("advantage", "advantage-1"):
        assert await here.dropped(1) == {group: "zero_variance"}


async def test_the_groups_of_a_killed_process_go_to_another_and_its_workers_die(here, tmp_path):
    here.start_run(run_config(reward={"timeout_seconds": 600}))
    path = tmp_path / "pid"
    async with here.service("reward", "reward-1") as process:
        await here.coordinator.hears("reward-1", "READY")
        (group,) = here.generate(["parts", f"hang-once {path}"])
        worker = await eventually(lambda: path.exists() and path.read_text(), "the worker's pid")
        await process.ends(signal.SIGKILL)
        await eventually(lambda: not is_alive(int(worker)), "the worker is gone")
    async with here.service("reward", "reward-2"), here.service("advantage", "advantage-1"):
        assert set(await here.trained(1)) == {group}


async def test_a_replica_that_cannot_start_workers_hands_its_groups_back_and_ends(here, tmp_path, monkeypatch):
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    here.start_run(run_config(reward={"workers": 1}, board={"lease_seconds": 600, "max_deliveries": 1}))
    path = tmp_path / "pid"
    async with here.service("reward", "reward-1") as process:
        await here.coordinator.hears("reward-1", "READY")
        here.generate([f"hang-once {path}"])
        worker = await eventually(lambda: path.exists() and path.read_text(), "the worker's pid")
        here.generate(*[["one", "parts"]] * 3)
        folder.rename(tmp_path / "gone")
        os.kill(int(worker), signal.SIGKILL)
        status = await here.coordinator.hears("reward-1", "FAILED")
        assert status.detail.startswith("reward worker can't be started: [Errno 2] No such file or directory")
        assert await process.ended() == 1  # for whoever supervises it
    assert "giving up: reward worker can't be started" in process.log
    assert here.board.counts().dropped == 0
    (tmp_path / "gone").rename(folder)
    async with here.service("reward", "reward-1"), here.service("advantage", "advantage-1"):
        await here.coordinator.hears("reward-1", "READY")
        assert len(await here.trained(4)) == 4
    assert here.board.dropped() == []


@pytest.mark.slow
async def test_nothing_is_lost_and_nothing_scored_twice_while_processes_die(here):
    """Two of each service, one of them killed and started anew four times, while groups flow."""
    # On a busy machine leases of a second also expire without a death: five of those aren't poison here.
    here.start_run(run_config(reward={"timeout_seconds": 60}, board={"max_deliveries": 100}))
    expected: list[str] = []
    async with AsyncExitStack() as stack:

        async def start(name: str):
            return await stack.enter_async_context(here.service(name.split("-")[0], name))

        processes = {name: await start(name) for name in ("reward-1", "advantage-1", "reward-2", "advantage-2")}
        for victim in ("reward-1", "advantage-1", "reward-2", "advantage-2"):
            await here.coordinator.hears(victim, "READY")
            expected += here.generate(*[["one", "parts", "sleep 0.02"]] * 10)
            await processes[victim].ends(signal.SIGKILL)
            processes[victim] = await start(victim)
        columns = await here.trained(len(expected))
    assert sorted(columns) == sorted(expected)
    for group in columns.values():
        np.testing.assert_array_equal(group["reward"], [1.0, 0.5, 1.0])
    assert here.board.dropped() == []
    counts = here.board.counts()
    assert (counts.published, counts.open, counts.dropped) == (len(expected), len(expected), 0)


async def test_a_worker_that_breaks_is_reported_and_ends_the_process(here):
    here.start_run(run_config())
    async with here.service("advantage", "advantage-1") as process:
        await here.coordinator.hears("advantage-1", "READY")
        with redis.Redis.from_url(here.redis_url) as client:
            client.set(key_prefix("run") + "stage:advantage", "not a stream")
        status = await here.coordinator.hears("advantage-1", "FAILED")
        assert "the worker of stage advantage failed" in status.detail
        assert "WRONGTYPE" in status.detail
        assert await process.ended() == 1  # for whoever supervises it
        assert "giving up: the worker of stage advantage failed" in process.log


@pytest.mark.parametrize("module", ["services.reward", "services.advantage", "services.trainer"])
def test_help(module):
    done = run_python("-m", module, "--help")
    assert done.returncode == 0, done.stderr
    assert "--coordinator" in done.stdout
    assert "RELAXD_REDIS" in done.stdout
