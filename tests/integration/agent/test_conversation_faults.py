"""Conversations whose engine or environment fails, with real gRPC servers."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from relaxd.board import Column, Delivery, Drop, DropReason
from relaxd.data.examples import Example
from relaxd.data.tokenizer import PromptTokenizer
from relaxd.v1 import environment_pb2_grpc
from relaxd.v1.sample_pb2 import SamplingParams
from relaxd.waiting import waits
from services.agent import engines, group_conversations
from services.agent.engines import EngineSession, WantedWeights
from services.agent.group_conversations import GroupConversations
from services.agent.service import EvaluationConversations
from tests.integration.agent.conversation_kit import ASKED, ECHO, check_tokens, config_of, service_of, talks
from tests.integration.agent.scripted_engines import Act, Fleet
from tests.kit.models import byte_tokenizer
from tests.kit.ports import free_port
from tests.kit.waiting import eventually


@pytest.fixture
def tokenizer(tmp_path: Path) -> PromptTokenizer:
    byte_tokenizer().save_pretrained(tmp_path / "model")
    return PromptTokenizer(tmp_path / "model")


@pytest.mark.parametrize(
    ("what", "engines"),
    [
        pytest.param("die", 2, id="the engine dies"),
        pytest.param("drain", 2, id="the engine is drained and stopped"),
        pytest.param("abort", 1, id="a pause ends the message"),
    ],
)
async def test_a_message_that_is_cut_off_goes_on_with_its_tokens(
    what: Any, engines: int, tokenizer: PromptTokenizer, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    fleet = Fleet(["well then", "end"], versions=[3, 4][:engines])
    fleet.acts = [Act(what, tokens=4)]
    async with (
        service_of(ECHO, {"notes": str(notes)}) as address,
        fleet.serving() as client,
        talks(config_of(address), tokenizer, client) as conversations,
    ):
        held = await conversations.hold("s", ASKED, [1], 7, 0)
        await eventually(lambda: "close" in notes.read_text(), "the session's end")
    assert (held.finish, held.turns, held.text) == ("env_done", 2, "end")
    check_tokens(held, "well then", "end")
    assert notes.read_text().split() == ["open", "well", "then", "end", "close"]
    first, second = fleet.asked[0], fleet.asked[-1]
    assert fleet.asked == [first, second, second]
    assert (first != second) == (engines > 1)
    version = {engine.name: engine.version for engine in fleet.engines}
    written = held.sequences[0].versions[held.sequences[0].loss_mask == 1]
    assert written.tolist() == [version[first]] * 4 + [version[second]] * (len("well then") - 3 + len("end") + 1)
    wrote = sorted({(version[name], f"digest {version[name]}", name) for name in (first, second)})
    assert held.receipts == wrote, "of all that have written it"
    assert [len(request.begun_tokens) for request in fleet.requests] == [0, 4, 0]
    assert fleet.requests[0].sampling == fleet.requests[1].sampling  # begun tokens count in max_new_tokens


async def test_a_full_engine_is_left_for_another_one_and_waited_for_if_there_is_none(
    tokenizer: PromptTokenizer,
) -> None:
    fleet = Fleet(["well", "end", "end"], versions=[3, 3])
    fleet.acts = [Act(), Act("full", retry_seconds=600)]
    async with (
        service_of(ECHO) as address,
        fleet.serving() as client,
        talks(config_of(address), tokenizer, client) as conversations,
    ):
        assert (await conversations.hold("a", ASKED, [1], 7, 0)).finish == "env_done"
        first, full, other = fleet.asked
        assert first == full != other
    fleet = Fleet(["end"], versions=[3])
    fleet.acts = [Act("full"), Act("full"), Act(), Act("full", retry_seconds=600)]
    async with fleet.serving() as client:
        session, sampling = EngineSession("a"), SamplingParams(max_new_tokens=9)
        reply = await client.generate(session, [1], sampling, lambda: 60.0)
        assert (reply.text, len(fleet.asked)) == ("end", 3)
        assert session.waited_seconds >= 0.1  # twice what the engine said; it doesn't count in conversation_seconds
        waiting = asyncio.create_task(client.generate(session, [2], sampling, lambda: 60.0))
        await eventually(lambda: any("that are full (rollout-0)" in one.reason for one in waits()), "the wait's name")
        waiting.cancel()


async def test_a_conversation_finds_its_engine_again_after_its_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "AVOIDED_SECONDS", 3600.0)  # of one that doesn't answer, which sleep isn't
    fleet = Fleet(["well", "end"], versions=[3])
    (engine,) = fleet.engines
    session, sampling = EngineSession("a"), SamplingParams(max_new_tokens=9)
    async with fleet.serving() as client:
        assert (await client.generate(session, [1], sampling, lambda: 60.0)).text == "well"
        engine.asleep = True
        asking = asyncio.create_task(client.generate(session, [2], sampling, lambda: 60.0))
        named = "no rollout replica is ready (rollout-0: asleep)"
        await eventually(lambda: any(named in one.reason for one in waits()), "the wait's name")
        engine.asleep = False
        reply = await asking
        assert (reply.text, len(fleet.asked)) == ("end", 3)
        assert session.waited_seconds > 0  # which doesn't count in conversation_seconds


class Refusing(environment_pb2_grpc.EnvironmentServicer):
    """A service of a user's whose calls fail with a plain status."""

    async def OpenSession(self, request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no more boards")


async def test_an_environment_at_an_address_is_talked_to(tokenizer: PromptTokenizer) -> None:
    fleet = Fleet(["well", "end", "hang", "raise"], versions=[3])
    async with fleet.serving() as client:
        async with service_of(ECHO) as address, talks(config_of(address), tokenizer, client) as conversations:
            held = await conversations.hold("s", ASKED, [1], 7, 0)
            assert (held.finish, held.turns, held.reward, held.info) == ("env_done", 2, 1.0, {"length": 3.0})
            check_tokens(held, "well", "end")
        bad = "tests.integration.envs.conversations:Bad"
        async with service_of(bad) as address, talks(config_of(address, call_seconds=0.3), tokenizer, client) as talk:
            for place, failure in enumerate(("step() took longer than 0.3 s", "RuntimeError: no luck")):
                held = await talk.hold(f"s{place}", Example(f"hello {place}"), [1], 7, 0)
                assert held.finish == "env_failed"
                assert held.failure.startswith(failure)
                assert held.turns == 1
        gone = config_of(f"grpc://127.0.0.1:{free_port()}", call_seconds=0.3)
        async with talks(gone, tokenizer, client) as talk:
            held = await talk.hold("s", ASKED, [1], 7, 0)
            assert (held.finish, held.turns) == ("env_failed", 0)
            assert held.failure.startswith("UNAVAILABLE: failed to connect to all addresses")
        server = grpc.aio.server()
        environment_pb2_grpc.add_EnvironmentServicer_to_server(Refusing(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with talks(config_of(f"grpc://127.0.0.1:{port}"), tokenizer, client) as talk:
            held = await talk.hold("s", ASKED, [1], 7, 0)
            assert held.failure == "RESOURCE_EXHAUSTED: no more boards"
        await server.stop(0)


FLAKY = '''
class Flaky:
    """Fails at its opening or at a step, until it has done so often enough."""

    failures = 0

    def __init__(self, at, often):
        self.at, self.often = at, often

    def fail(self, at):
        if at == self.at and Flaky.failures < self.often:
            Flaky.failures += 1
            raise OSError("no board")

    def open(self, sample):
        self.fail("open")

    def step(self, reply):
        self.fail(reply.text)
        return "go on", 0.5, reply.text == "end"
'''
DROPPED, OPEN, LATER = "dropped", "open", "second"


@pytest.mark.parametrize(
    ("agent", "at", "often", "expected"),
    [
        pytest.param({"on_failure": "zero"}, OPEN, 1, (0, False), id="zero, at the opening"),
        pytest.param({"on_failure": "zero"}, LATER, 1, (2, True), id="zero, at a step"),
        pytest.param({"on_failure": "mask"}, OPEN, 1, (0, False), id="mask, at the opening"),
        pytest.param({"on_failure": "mask"}, LATER, 1, (2, False), id="mask, at a step"),
        pytest.param({"on_failure": "zero"}, OPEN, 2, DROPPED, id="zero, but all at the opening"),
        pytest.param({"on_failure": "drop"}, LATER, 1, DROPPED, id="drop"),
        pytest.param({"on_failure": "retry", "max_retries": 2}, LATER, 2, None, id="retry"),
        pytest.param({"on_failure": "retry", "max_retries": 1}, OPEN, 3, DROPPED, id="retry, too often"),
    ],
)
async def test_a_failed_conversation_does_to_its_group_what_the_run_says(
    agent: dict[str, Any],
    at: str,
    often: int,
    expected: Any,
    tokenizer: PromptTokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group_conversations, "RETRY_PAUSE", group_conversations.Backoff(0.01))
    (tmp_path / "flaky.py").write_text(FLAKY)
    # The samples of a group have one prompt, and so one script here.
    fleet = Fleet(["first", "second", "end"], versions=[3])
    published = tokenizer.encode([ASKED])[0]
    columns: dict[str, Column] = {
        "prompt": {"messages": ASKED.messages, "answer": "42", "metadata": {}},
        "prompt_tokens": published,
    }
    async with (
        service_of(f"{tmp_path}/flaky.py:Flaky", {"at": at, "often": often}) as address,
        fleet.serving() as client,
        talks(config := config_of(address, **agent), tokenizer, client) as conversations,
    ):
        places = asyncio.Semaphore(config.agent.max_sessions)
        ended: list[int] = []
        groups = GroupConversations(
            config,
            lambda delivery, oldest: True,
            client,
            conversations,
            places,
            lambda: ended.append(groups.room(1, 0)),
        )
        delivery = Delivery("0-0-1", "1-0", "rollout", "agent-0", 1, {}, 0, {})
        result = await asyncio.wrap_future(groups.process(delivery, columns))
    if expected == DROPPED:
        assert isinstance(result, Drop)
        assert result.reason == DropReason.ENVIRONMENT_FAILED
        assert "OSError: no board (flaky.py:" in result.detail
        return
    assert len(ended) == 2  # the samples
    written: Any = result
    failed = [place for place, finish in enumerate(written["finish"]) if finish == "env_failed"]
    sizes, ends = written["lengths"], np.cumsum(written["lengths"])
    masks = np.split(written["loss_mask"], ends[:-1])
    assert len(written["tokens"]) == sizes.sum()
    for place in {0, 1}.difference(failed):
        assert (written["finish"][place], written["turns"][place]) == ("env_done", 3)
        assert masks[place].sum() == len("firstsecondend") + 3
    if expected is None:
        assert not failed
        return
    ((turns, trained),) = [expected for _ in failed]
    assert written["turns"][failed[0]] == turns
    assert masks[failed[0]].any() == trained
    assert (sizes[failed[0]] > 0) == (turns > 0)


@pytest.mark.parametrize(
    ("versions", "or_later", "asked"),
    [([3, 4, 5], False, "rollout-1"), ([3, 5], True, "rollout-1"), ([4, 3], True, "rollout-0")],
)
async def test_evaluations_ask_only_engines_with_their_weights_and_hold_failed_conversations_again(
    versions: list[int],
    or_later: bool,
    asked: str,
    tokenizer: PromptTokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group_conversations, "RETRY_PAUSE", group_conversations.Backoff(0.01))
    (tmp_path / "flaky.py").write_text(FLAKY)
    fleet = Fleet(["first", "end"], versions)
    sampling = SamplingParams(max_new_tokens=90, seed=3, stop=["x"])
    async with (
        service_of(f"{tmp_path}/flaky.py:Flaky", {"at": "end", "often": 2}) as address,
        fleet.serving() as client,
        talks(config := config_of(address, on_failure="retry"), tokenizer, client) as conversations,
    ):
        evaluations = EvaluationConversations(config.agent, {"set": conversations}, asyncio.Semaphore(2))
        wanted = WantedWeights(term=1, version=4, or_later=or_later)
        held = [one async for one in evaluations.hold("set", ASKED, 4, sampling, wanted)]
    assert set(fleet.asked) == {asked}
    assert len(fleet.asked) == 2 * (4 + 2)
    assert {tuple(request.sampling.stop) for request in fleet.requests} == {("x",)}
    assert sorted(one.sample for one in held) == [0, 1, 2, 3]
    assert {(one.failure, one.turns, one.outcome.reward, one.token_count) for one in held} == {
        ("", 2, 1.0, len("firstend") + 2)
    }
