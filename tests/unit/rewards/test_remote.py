"""Rewards of services at reward.address: real gRPC and HTTP servers that work, fail, die, and come back."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import grpc
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from pydantic import ValidationError

from relaxd.config import RewardConfig
from relaxd.rewards import RewardInput, RewardOutput
from relaxd.v1 import remote_reward_pb2 as pb
from relaxd.v1.remote_reward_pb2_grpc import RemoteRewardServicer, add_RemoteRewardServicer_to_server
from relaxd.waiting import Backoff, waits
from services.reward import patience, remote_scorer
from services.reward.patience import MismatchError
from services.reward.remote_scorer import RemoteScorer
from services.reward.reward_trial import try_reward
from services.reward.service import ScoreCache
from services.reward.worker_enclosure import MissingVariableError
from services.reward.worker_pool import Failure
from tests.kit.cases import each
from tests.kit.ports import free_port
from tests.kit.waiting import eventually


def samples(*responses: str, **fields) -> list[RewardInput]:
    return [RewardInput("1+1?", response, answer="2", metadata={"n": 1}, tokens=3, **fields) for response in responses]


class Judge(RemoteRewardServicer):
    """A reward service whose answers a test decides."""

    def __init__(self) -> None:
        self.requests: list[pb.ScoreAnswersRequest] = []
        self.rules: dict[str, Callable[[], pb.AnswerScore]] = {}
        self.in_flight = self.most_in_flight = 0
        self.go = asyncio.Event()
        self.go.set()

    async def ScoreAnswers(self, request, context):
        if not request.answers:
            return pb.ScoreAnswersResponse()
        self.requests.append(request)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await self.go.wait()
            for answer in request.answers:
                if answer.text in ("INTERNAL", "UNAVAILABLE", "UNIMPLEMENTED"):
                    await context.abort(getattr(grpc.StatusCode, answer.text), "as the test wants")
                if answer.text == "too few":
                    return pb.ScoreAnswersResponse()
            return pb.ScoreAnswersResponse(scores=[self._score(answer, request) for answer in request.answers])
        finally:
            self.in_flight -= 1

    def _score(self, answer, request):
        if answer.text == "bad":
            return pb.AnswerScore(error="I can't read it")
        if answer.text == "nothing":
            return pb.AnswerScore()
        if answer.text == "nan":
            return pb.AnswerScore(reward=float("nan"))
        return pb.AnswerScore(reward=float(answer.text == request.reference), parts={"length": len(answer.text)})


class Bench:
    def __init__(self, stack: AsyncExitStack) -> None:
        self.stack, self.judge, self.port = stack, Judge(), free_port()
        self.server: grpc.aio.Server | None = None

    async def serve(self, servicer=None, add=add_RemoteRewardServicer_to_server) -> None:
        self.server = grpc.aio.server()
        add(servicer or self.judge, self.server)
        assert self.server.add_insecure_port(f"127.0.0.1:{self.port}") == self.port
        await self.server.start()

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop(0)

    def config(self, **settings) -> RewardConfig:
        return RewardConfig(**{"address": f"127.0.0.1:{self.port}", "timeout_seconds": 5.0, **settings})

    def remote(self, **settings) -> RemoteScorer:
        remote = RemoteScorer(self.config(**settings))
        self.stack.push_async_callback(remote.close)
        return remote


@pytest.fixture
async def bench(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    monkeypatch.setattr(patience, "PAUSE", Backoff(0.01, 0.05))
    monkeypatch.setattr(patience, "PROBE_PAUSE", Backoff(0.01, 0.05))
    monkeypatch.setattr(
        remote_scorer, "_OPTIONS", [*remote_scorer._OPTIONS[:-2], ("grpc.min_reconnect_backoff_ms", 50)]
    )
    async with AsyncExitStack() as stack:
        made = Bench(stack)
        stack.push_async_callback(made.stop)
        yield made


async def test_a_group_is_one_call_and_has_all_that_a_reward_gets(bench):
    await bench.serve()
    remote = bench.remote(settings={"strict": True})
    await remote.probe()
    assert await remote.score(samples("2", "3", "bad", "nan", finish_reason="stop")) == [
        RewardOutput(1.0, {"length": 1.0}),
        RewardOutput(0.0, {"length": 1.0}),
        Failure(f"the reward service at 127.0.0.1:{bench.port}: I can't read it"),
        Failure(f"the reward service at 127.0.0.1:{bench.port}: the reward is nan: it must be finite"),
    ]
    (request,) = bench.judge.requests
    assert (request.prompt, request.reference, json.loads(request.metadata_json)) == ("1+1?", "2", {"n": 1})
    assert json.loads(request.settings_json) == {"strict": True}
    assert json.loads(request.prompt_messages_json)[0]["role"] == "user"
    assert [(one.text, one.finish_reason, one.tokens) for one in request.answers[:1]] == [("2", "stop", 3)]


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("INTERNAL", "INTERNAL: as the test wants"),
        ("UNIMPLEMENTED", "has no call relaxd.v1.RemoteReward/ScoreAnswers: is it made from another version"),
        ("too few", "returned 0 scores for 1 answers: is it made from another version"),
        ("nothing", "a score with neither reward nor error: is it made from another version"),
    ],
)
async def test_a_wrong_answer_fails_the_samples_and_is_not_asked_for_again(bench, response, reason):
    await bench.serve()
    (outcome,) = await bench.remote().score(samples(response))
    assert isinstance(outcome, Failure)
    assert reason in outcome.reason
    assert len(bench.judge.requests) == 1


async def test_a_service_of_another_version_is_named_before_the_run(bench):
    def add(servicer, server):  # the same call, of another package
        handler = grpc.unary_unary_rpc_method_handler(lambda request, context: b"")
        service = grpc.method_handlers_generic_handler("relaxd.v2.RemoteReward", {"ScoreAnswers": handler})
        server.add_generic_rpc_handlers((service,))

    await bench.serve(add=add)
    with pytest.raises(MismatchError, match=r"relaxd\.v1\.RemoteReward/ScoreAnswers: is it made from another version"):
        await bench.remote().start()
    assert "another version" in (await try_reward(bench.config(), samples("2"), workers=1))["error"]


async def test_a_service_of_the_other_protocol_is_named_before_the_run(bench):
    await bench.serve()
    with pytest.raises(MismatchError, match=rf'speak HTTP; if it speaks gRPC, write .* = "127\.0\.0\.1:{bench.port}"'):
        await bench.remote(address=f"http://127.0.0.1:{bench.port}/score").start()
    server = TestServer(web.Application())
    await server.start_server()
    try:
        with pytest.raises(
            MismatchError, match=rf'speak gRPC; if .* HTTP, write .* = "http://127.0.0.1:{server.port}/PATH"'
        ):
            await bench.remote(address=f"127.0.0.1:{server.port}").start()
    finally:
        await server.close()


async def test_the_trial_says_that_nobody_is_there(bench):
    assert "can't be reached: UNAVAILABLE" in (await try_reward(bench.config(), samples("2"), workers=1))["error"]


async def test_terms_at_addresses_are_summed_with_those_of_workers(bench):
    """1 for the service's "is it the reference", and a half for the worker's pattern, where the service says yes."""
    terms = [
        {"address": f"127.0.0.1:{bench.port}", "label": "same", "settings": {"strict": True}},
        {"name": "regex", "settings": {"pattern": "."}, "weight": 0.5, "only_if": "same"},
        {"address": f"127.0.0.1:{bench.port}", "label": "twice", "weight": 2.0, "maximum": 0.5, "only_if": "regex"},
    ]
    config = bench.config(address="", terms=terms)
    assert "can't be reached: UNAVAILABLE" in (await try_reward(config, samples("2"), workers=1))["error"]
    await bench.serve()
    right, wrong, bad = (await try_reward(config, samples("2", "3", "bad"), workers=3))["outcomes"]
    assert (right["reward"], wrong["reward"]) == (1 + 0.5 + 2 * 0.5, 0)
    assert right["parts"] == {
        "same": 1,
        "same_length": 1,
        "regex": 1,
        "regex_too_slow": 0,
        "twice": 0.5,
        "twice_length": 1,
    }
    assert bad["error"] == f"the reward service at 127.0.0.1:{bench.port}: I can't read it"
    settings = [json.loads(request.settings_json) for request in bench.judge.requests]
    assert sorted(map(bool, settings)) == [False] * 3 + [True] * 3
    alone = bench.config(address="", terms=[terms[0]])
    assert (await try_reward(alone, samples("2"), workers=1))["outcomes"][0]["reward"] == 1
    wrong_name = bench.config(address="", terms=[*terms, {"name": "nope:f"}])
    assert "nope" in (await try_reward(wrong_name, samples("2"), workers=1))["error"]


async def test_a_late_answer_fails_its_samples(bench):
    await bench.serve()
    bench.judge.go.clear()
    (outcome,) = await bench.remote(timeout_seconds=0.05).score(samples("2"))
    assert outcome == Failure(
        f"the reward service at 127.0.0.1:{bench.port}: scoring 1 answers took longer than 0.05 s"
    )


async def test_samples_wait_while_the_service_is_away_and_it_says_so(bench):
    remote = bench.remote()
    await remote.start()
    scoring = asyncio.create_task(remote.score(samples("2")))
    probes = remote.pieces
    await eventually(lambda: remote.pieces > probes + 1, "probes, which count as progress")
    assert f"the reward service at 127.0.0.1:{bench.port} does not answer, for 0 s now: UNAVAILABLE" in remote.detail
    assert not scoring.done()
    await bench.serve()
    assert await asyncio.wait_for(scoring, 10) == [RewardOutput(1.0, {"length": 1.0})]
    assert remote.detail == ""


async def test_a_service_that_dies_in_the_middle_stops_all_calls_but_probes(bench):
    await bench.serve()
    remote = bench.remote()
    assert isinstance((await remote.score(samples("2")))[0], RewardOutput)
    await bench.stop()
    scoring = [asyncio.create_task(remote.score(samples(str(number)))) for number in range(8)]
    await eventually(lambda: "does not answer" in remote.detail, "the breaker is open")
    await bench.serve()
    outcomes = await asyncio.wait_for(asyncio.gather(*scoring), 20)
    assert [outcome.reward for (outcome,) in outcomes] == [0, 0, 1, 0, 0, 0, 0, 0]


async def test_an_outage_has_an_end_which_resume_moves(bench):
    # The moved end must leave time for a server to start and for a probe to reach it, even on a busy machine.
    remote = bench.remote(outage_seconds=2.0)
    await remote.start()
    (outcome,) = await asyncio.wait_for(remote.score(samples("2")), 10)
    assert isinstance(outcome, Failure)
    assert re.search(r"does not answer, for \d+ s now: UNAVAILABLE", outcome.reason)
    remote.forgive()
    scoring = asyncio.create_task(remote.score(samples("2")))
    await bench.serve()
    assert isinstance((await asyncio.wait_for(scoring, 10))[0], RewardOutput)


async def test_what_the_service_always_dies_of_is_given_up(bench):
    await bench.serve()
    (outcome,) = await asyncio.wait_for(bench.remote().score(samples("UNAVAILABLE")), 20)
    assert isinstance(outcome, Failure)
    assert "can't be reached: UNAVAILABLE: as the test wants (10 tries)" in outcome.reason
    assert len(bench.judge.requests) == patience.ATTEMPTS


async def test_no_more_calls_are_open_than_allowed(bench):
    await bench.serve()
    remote = bench.remote(max_in_flight=3)
    bench.judge.go.clear()
    scoring = asyncio.gather(*(remote.score(samples("2")) for _ in range(12)))
    await eventually(lambda: bench.judge.in_flight == 3, "three calls")
    bench.judge.go.set()
    await asyncio.wait_for(scoring, 10)
    assert (bench.judge.most_in_flight, len(bench.judge.requests)) == (3, 12)


async def test_equal_samples_are_scored_once_and_failures_again(bench):
    await bench.serve()
    remote, cache = bench.remote(), ScoreCache(2)
    first = await cache.score(samples("2", "2", "bad"), remote.score)
    assert first[0] == first[1] == RewardOutput(1.0, {"length": 1.0})
    assert [len(request.answers) for request in bench.judge.requests] == [2]
    await cache.score(samples("2", "bad"), remote.score)
    assert [one.text for one in bench.judge.requests[-1].answers] == ["bad"]
    await cache.score([RewardInput("1+1?", "2", answer="3")], remote.score)
    assert len(bench.judge.requests) == 3, "another reference is another sample"
    await cache.score(samples("x", "y"), remote.score)
    await cache.score(samples("2"), remote.score)
    assert [one.text for one in bench.judge.requests[-1].answers] == ["2"], "two are remembered, no more"
    assert cache.hits == 2
    assert len(bench.judge.requests) == 5
    cache.clear()
    await cache.score(samples("2"), remote.score)
    assert len(bench.judge.requests) == 6


async def test_remote_rm_over_http(bench):
    seen = []

    async def score(request: web.Request) -> web.Response:
        body = await request.json()
        seen.append(body)
        kind = body["response"]
        if kind == "busy" and len(seen) < 3:
            return web.Response(status=503, text="later")
        if kind == "broken":
            return web.Response(status=500, text="oh dear")
        texts = {"text": "hello", "mapping": '{"score": 0.5, "depth": 2, "why": "so"}', "huge": "1" * (2 << 20)}
        return web.Response(text=texts.get(kind, "1.5"), content_type="application/json")

    app = web.Application()
    app.router.add_post("/score", score)
    runner = web.AppRunner(app)
    await runner.setup()
    bench.stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", bench.port).start()
    url = f"http://127.0.0.1:{bench.port}/score"
    remote = bench.remote(address=url)
    await remote.probe()
    fine, mapping, text, broken, busy, huge = await remote.score(
        samples("fine", "mapping", "text", "broken", "busy", "huge")
    )
    assert {"prompt": "1+1?", "response": "fine", "label": "2", "metadata": {"n": 1}} in seen
    assert (fine, busy) == (RewardOutput(1.5), RewardOutput(1.5))
    assert mapping == RewardOutput(0.5, {"depth": 2.0})
    assert text == Failure(f"the reward service at {url} answered 'hello', which is not JSON")
    assert broken == Failure(f"the reward service at {url}: HTTP 500: oh dear")
    assert isinstance(huge, Failure)


async def test_a_proxy_without_its_service_is_an_outage_that_is_waited_for(bench):
    """A proxy accepts connections and answers 503; the service comes back after more tries than a sample has."""
    away, asked = True, {"HEAD": 0, "POST": 0}

    async def answer(request: web.Request) -> web.Response:
        asked[request.method] += 1
        return web.Response(status=503, text="no upstream") if away else web.json_response(1.5)

    app = web.Application()
    app.router.add_route("*", "/score", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    bench.stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", bench.port).start()
    remote = bench.remote(address=f"http://127.0.0.1:{bench.port}/score")
    scoring = asyncio.create_task(remote.score(samples("2", "3")))
    await eventually(lambda: asked["HEAD"] > patience.ATTEMPTS, "more probes than a sample has tries")
    assert "/score does not answer, for " in remote.detail
    assert remote.detail.endswith("HTTP 503")
    assert asked["POST"] < patience.ATTEMPTS
    assert not scoring.done()
    away = False
    assert await asyncio.wait_for(scoring, 10) == [RewardOutput(1.5), RewardOutput(1.5)]


async def test_nothing_is_posted_before_the_service_wants_it(bench):
    posted: list[float] = []
    refusal = web.Response(status=429, headers={"Retry-After": "1"})

    async def answer(request: web.Request) -> web.Response:
        posted.append(time.monotonic())
        return refusal if len(posted) == 1 else web.json_response(1.5)

    app = web.Application()
    app.router.add_post("/score", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    bench.stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", bench.port).start()
    remote = bench.remote(address=f"http://127.0.0.1:{bench.port}/score")
    first = asyncio.create_task(remote.score(samples("2")))
    reasons = await eventually(lambda: [str(wait) for wait in waits() if "Retry-After" in wait.reason], "a named wait")
    pieces, second = remote.pieces, asyncio.create_task(remote.score(samples("3")))
    assert await asyncio.gather(first, second) == [[RewardOutput(1.5)], [RewardOutput(1.5)]]
    assert reasons == [f"the reward service at http://127.0.0.1:{bench.port}/score, which answered Retry-After"]
    assert len(posted) == 3
    assert min(posted[1:]) - posted[0] >= 0.9
    assert remote.pieces > pieces + 2, "waiting counts as progress"

    refusal = web.Response(status=503, headers={"Retry-After": "9999"})
    posted.clear()
    brief = bench.remote(address=f"http://127.0.0.1:{bench.port}/score", outage_seconds=0.1)
    assert await brief.score(samples("2")) == [RewardOutput(1.5)]  # no longer than that


@pytest.mark.parametrize(
    ("status", "text", "tries", "reason"),
    [
        (None, "", 1, "SERVER: Received message larger than max"),
        ("RESOURCE_EXHAUSTED", "grpc: received message larger than max (99 vs. 9)", 1, "raise the service's limit"),
        ("RESOURCE_EXHAUSTED", "gRPC message exceeds maximum size 9: 99", 1, "raise the service's limit"),
        ("RESOURCE_EXHAUSTED", "too many messages, come back later", patience.ATTEMPTS, "can't be reached"),
    ],
)
async def test_a_request_above_a_limit_fails_at_once_and_a_busy_service_does_not(bench, status, text, tries, reason):
    async def refuse(request, context):
        if request.answers:
            bench.judge.requests.append(request)
            await context.abort(getattr(grpc.StatusCode, status), text)
        return pb.ScoreAnswersResponse()

    if status:
        bench.judge.ScoreAnswers = refuse
    await bench.serve()
    remote = bench.remote()
    long, short = samples("x" * (5 << 20) if status is None else "x", "2")
    (outcome,) = await asyncio.wait_for(remote.score([long]), 20)
    assert isinstance(outcome, Failure)
    assert reason in outcome.reason
    assert len(bench.judge.requests) == (tries if status else 0)
    assert remote.detail == ""
    if status is None:
        assert "the request with 1 answers has 52" in outcome.reason
        assert await remote.score([short]) == [RewardOutput(1.0, {"length": 1.0})]


async def test_the_token_is_sent_and_a_missing_one_is_named(bench, monkeypatch):
    given = []
    scored = bench.judge.ScoreAnswers

    async def look(request, context):
        given.append(dict(context.invocation_metadata()).get("authorization"))
        return await scored(request, context)

    bench.judge.ScoreAnswers = look
    await bench.serve()
    with pytest.raises(MissingVariableError, match=r"reward.address_token names JUDGE_KEY, not set in the reward"):
        bench.remote(address_token="JUDGE_KEY")
    tried = await try_reward(bench.config(address_token="JUDGE_KEY"), samples("2"), workers=1)
    assert "names JUDGE_KEY, not set" in tried["error"]
    monkeypatch.setenv("JUDGE_KEY", "a-secret\n")
    remote = bench.remote(address_token="JUDGE_KEY")
    await remote.probe()
    await remote.score(samples("2"))
    assert given == ["Bearer a-secret"] * 2
    app, headers = web.Application(), []
    app.router.add_post("/", lambda request: headers.append(request.headers["authorization"]) or web.json_response(1))
    runner = web.AppRunner(app)
    await runner.setup()
    bench.stack.push_async_callback(runner.cleanup)
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await bench.remote(address=f"http://127.0.0.1:{port}/", address_token="JUDGE_KEY").score(samples("2"))
    assert headers == ["Bearer a-secret"]


@each(
    ("settings", "reason"),
    [
        ({"address": "judge"}, "must be"),
        ({"address": "judge:http"}, "must be"),
        ({"address": "judge:99999"}, "must be"),
        ({"address": "judge:9000/score"}, "must be"),
        ({"address": "ftp://judge/score"}, "must be"),
        ({"address": "http://"}, "must be"),
        ({"address": "https://user:secret@judge/score"}, "it has credentials, which logs would show"),
        ({"address": "judge:9000", "name": "math"}, "reward.address is the whole reward"),
        ({"address": "judge:9000", "choose_by": "rm_type"}, "reward.address is the whole reward"),
        ({}, "reward.name is missing"),
        ({"address": "judge:9000"}, None),
        ({"address": "[::1]:9000"}, None),
        ({"address": "https://judge.example/score?key=secret"}, "it has parameters, which logs would show"),
        ({"address": "https://judge.example/score#top"}, "it has parameters, which logs would show"),
        ({"address": "judge:9000", "address_token": "a key"}, "'a key' is not the name of an environment variable"),
        ({"address": "judge:9000", "address_token": "RELAXD_TOKEN"}, "which rewards don't get"),
        ({"name": "math", "address_token": "JUDGE_KEY"}, "reward.address_token is for a service at reward.address"),
        ({"address": "https://judge.example/score", "address_token": "JUDGE_KEY"}, None),
    ],
)
def test_addresses(settings, reason):
    if reason is None:
        assert RewardConfig(**settings).shown == settings["address"]
        return
    with pytest.raises(ValidationError, match=reason):
        RewardConfig(**settings)
