"""Questions to a judge: reading of replies, the bundled rewards, the way through a worker, and a real HTTP server."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from PIL import Image

from relaxd.config import JudgeConfig, RewardConfig
from relaxd.media.messages import to_proto
from relaxd.media.sources import data_uri
from relaxd.rewards import RewardInput, RewardOutput, resolve
from relaxd.rewards.judge import JudgeError, NoJudgeError, UnreadableReplyError, ask, connect
from relaxd.rewards.judge.single import read_field, read_number, read_side, read_yes_no
from relaxd.rpc.errors import InvalidArgument
from relaxd.v1.judge_pb2 import AskRequest, AskResponse
from relaxd.waiting import Backoff, waits
from services.reward import patience
from services.reward.http_services import ChatCompletions, retry_after
from services.reward.judge import JudgeClient
from services.reward.patience import MismatchError, Pace
from services.reward.reward_trial import NOT_YET, try_reward
from services.reward.worker_pool import Failure, WorkerPool
from services.rollout.judge import parse_messages
from tests.kit.cases import each
from tests.kit.ports import free_port
from tests.kit.processes import python_path
from tests.kit.vision import encoded
from tests.kit.waiting import PATIENCE, eventually

KEY = "sk-a-key-that-nobody-may-see"


# --- replies ------------------------------------------------------------------------------------------------------


@each(
    ("reply", "found"),
    [
        ("Score: 7", 7),
        ("It is fine.\n\n**Score: 7.5**", 7.5),
        ("Score: 7/10", 7),
        ("7/10", 7),
        ("7", 7),
        ("Good.\n8.", 8),
        ("Score: 3. On second thought, Score: 4", 4),
        ("<think>Score: 9</think>Score: 2", 2),
        ("The rating is 6", 6),
        ("Score: [[5]]", 5),
        ("Score: 11", None),
        ("Score: -1", None),
        ("I like 3 things about it", None),
        ("Score: 70%", None),
        ("Score: nan", None),
        ("<think>Score: 9", 9),
        ("<think>Score: 9</think>", None),
        ("", None),
        ("score" * 100_000, None),
        (" " * 100_000, None),
    ],
)
def test_numbers(reply, found):
    begun = time.process_time()
    assert read_or_none(lambda text: read_number(text, 0, 10), reply) == found
    assert time.process_time() - begun < 2


@each(
    ("reply", "found"),
    [
        ("Judgement: 1", 1),
        ("Judgment: no", 0),
        ("Yes", 1),
        ("It matches.\nno.", 0),
        ("**Verdict**: Correct", 1),
        ("incorrect", 0),
        ("Judgement: 10", None),
        ("Yesterday", None),
        ("maybe", None),
        ("No, wait", None),
    ],
)
def test_yes_and_no(reply, found):
    assert read_or_none(read_yes_no, reply) == found


@each(
    ("reply", "found"),
    [
        ('{"score": 7}', 7),
        ('Here: ```json\n{"reason": "a {brace}", "score": 3.5}\n```', 3.5),
        ('{"score": true}', 10),
        ('{"score": 1} no: {"score": 2}', 2),
        ('{"outer": {"score": 4}}', 4),
        ('{"score": "7"}', None),
        ('{"score": 70}', None),
        ('{"other": 7}', None),
        ("{" * 100_000, None),
        ("7", None),
    ],
)
def test_fields(reply, found):
    assert read_or_none(lambda text: read_field(text, "score", 0, 10), reply) == found


@pytest.mark.parametrize(
    ("reply", "found"),
    [("Verdict: A", "A"), ("[[B]]", "B"), ("Verdict: tie", "TIE"), ("Answer: Bonn", None), ("A is nice", None)],
)
def test_sides(reply, found):
    assert read_or_none(read_side, reply) == found


def read_or_none(read: Callable[[str], Any], reply: str) -> Any:
    with suppress(ValueError):
        return read(reply)
    return None


# --- rewards ------------------------------------------------------------------------------------------------------


class Scripted:
    """A line to a judge whose replies a test decides, by the question's text and its number."""

    def __init__(self, reply: Callable[[str, int], str]) -> None:
        self.reply = reply
        self.questions: list[AskRequest] = []
        self.unreadable = 0

    async def ask(self, question: AskRequest) -> AskResponse:
        self.questions.append(question)
        return AskResponse(text=self.reply(question.messages[-1].content[0].text, len(self.questions)))

    def count_unreadable(self) -> None:
        self.unreadable += 1


def run(line: Scripted | None, name: str, scored: Any, **settings: Any) -> Any:
    connect(line)
    try:
        return asyncio.run(resolve(name, settings)(scored))
    finally:
        connect(None)


SAMPLE = RewardInput("1+1?", "<think>hm</think>It is {2}, {prompt}", "2", {"subject": "sums"})


def test_a_question_has_what_its_template_says_and_no_more():
    line = Scripted(lambda text, number: "Score: 10")
    assert run(line, "judge", SAMPLE) == {"reward": 1.0}
    text = line.questions[0].messages[-1].content[0].text
    for part in ("<question>\n1+1?", "<reference_answer>\n2\n", "It is {2}, {prompt}", "from 0 (useless) to 10"):
        assert part in text
    assert "hm" not in text
    template = '{metadata.subject} | {response} | {answer} | {"score": N}'
    assert run(line, "judge", SAMPLE, template=template, system="Be kind.", thinking=True) == {"reward": 1.0}
    asked = line.questions[-1].messages
    assert [message.role for message in asked] == ["system", "user"]
    assert asked[1].content[0].text == f'sums | {SAMPLE.response} | 2 | {{"score": N}}'
    json_line = Scripted(lambda text, number: '{"grade": 3}')
    assert run(json_line, "judge", SAMPLE, reply="json", field="grade", minimum=1, maximum=5) == {"reward": 0.5}
    assert '"grade": N}' in json_line.questions[0].messages[-1].content[0].text


@pytest.mark.parametrize(
    ("settings", "replies", "result"),
    [
        ({"votes": 4}, ["2", "4", "4", "10"], {"reward": 0.5, "agreement": 0.5}),
        ({"votes": 4, "vote": "majority"}, ["2", "4", "4", "10"], {"reward": 0.4, "agreement": 0.5}),
        ({"votes": 2, "vote": "majority"}, ["2", "4"], {"reward": 0.3, "agreement": 0.5}),
        ({"votes": 3, "vote": "majority", "reply": "yes_no"}, ["yes", "no", "yes"], {"reward": 1, "agreement": 2 / 3}),
    ],
)
def test_votes(settings, replies, result):
    line = Scripted(lambda text, number: replies[number - 1])
    assert run(line, "judge", SAMPLE, **settings) == pytest.approx(result)
    assert len({question.seed for question in line.questions}) == len(replies)


def test_a_reply_that_makes_no_sense_is_asked_for_again_and_then_fails():
    line = Scripted(lambda text, number: "Score: 4" if number == 3 else "hm")
    assert run(line, "judge", SAMPLE) == {"reward": 0.4}
    assert (len(line.questions), line.unreadable) == (3, 2)
    assert len({question.seed for question in line.questions}) == 3
    line = Scripted(lambda text, number: "what? " * 100)
    with pytest.raises(
        UnreadableReplyError, match=r"2 replies of the judge could not be read: it states no number.*what"
    ):
        run(line, "judge", SAMPLE, retries=1)
    assert line.unreadable == 2
    with pytest.raises(NoJudgeError, match=r"in a run with roles.judge.model"):
        run(None, "judge", SAMPLE)


def ask_about(line: Scripted, *parts: Any) -> str:
    connect(line)
    try:
        return asyncio.run(ask([{"role": "user", "content": parts}]))
    finally:
        connect(None)


def test_images_may_have_the_form_of_openai():
    uri = "data:image/png;base64,iVBORw0KGgo="
    line = Scripted(lambda text, number: "fine")
    text = {"type": "text", "text": "What is it?"}
    for image in ({"url": uri, "detail": "auto"}, uri):
        assert ask_about(line, text, {"type": "image_url", "image_url": image}, {"type": "image", "uri": uri}) == "fine"
        content = line.questions[-1].messages[0].content
        assert [part.image.uri for part in content] == ["", uri, uri]


@each(
    "part",
    [
        {"type": "image_url"},
        {"type": "image_url", "image_url": {"uri": "data:image/png;base64,"}},
        {"type": "image"},
        {"type": "image", "image": "data:image/png;base64,"},
        {"type": "text"},
        {"text": "What?"},
        {"type": "input_image", "image_url": "data:image/png;base64,"},
        "What?",
    ],
)
def test_parts_of_other_forms_are_refused_by_their_place(part):
    line = Scripted(lambda text, number: "fine")
    with pytest.raises(JudgeError) as caught:
        ask_about(line, {"type": "text", "text": "Well?"}, part)
    assert str(caught.value).startswith("messages[0].content[1] of the question to the judge ")
    assert '{"type": "image_url", "image_url": {"url": ...}}' in str(caught.value)
    assert not line.questions


def test_messages_of_other_forms_are_refused_by_their_place():
    for message in ({"content": "Well?"}, {"role": "user", "content": 7}):
        connect(Scripted(lambda text, number: "fine"))
        with pytest.raises(JudgeError, match=r"messages\[0\] of the question to the judge must look like"):
            asyncio.run(ask([message]))
        connect(None)


@each(
    ("name", "settings", "message"),
    [
        ("judge", {"reply": "words"}, 'reward.settings.reply is "words"'),
        ("judge", {"votes": 0}, "votes = 0"),
        ("judge", {"vote": "median"}, 'vote = "median"'),
        ("judge", {"minimum": 5, "maximum": 5}, "minimum must be less"),
        ("judge", {"template": "{prompt}"}, r"has no \{response\}"),
        ("judge", {"template": "{response} {metadata.level}"}, "metadata have no 'level'"),
        ("judge", {"template": "{response} {first}"}, r"\{first\}, which this reward doesn't fill in"),
        ("judge_pairs", {"template": "{first}"}, r"has no \{second\}"),
        ("judge_pairs", {"opponents": -1}, "opponents = -1"),
    ],
)
def test_wrong_settings_are_named_before_anybody_is_asked(name, settings, message):
    line = Scripted(lambda text, number: "Score: 1")
    scored = [SAMPLE, RewardInput("1+1?", "3")] if name == "judge_pairs" else SAMPLE
    with pytest.raises(ValueError, match=message):
        run(line, name, scored, **settings)
    assert not line.questions


def texts(*responses: str) -> list[RewardInput]:
    return [RewardInput("?", response) for response in responses]


def compare(text: str, number: int) -> str:
    """The greater number is better."""
    first, second = (
        float(part.partition("</answer")[0]) for part in text.split("<answer_")[1:][:2] for part in [part[3:]]
    )
    return "Verdict: tie" if first == second else f"Verdict: {'A' if first > second else 'B'}"


def test_pairs_are_compared_in_both_orders():
    line = Scripted(compare)
    got = run(line, "judge_pairs", texts("1", "3", "2", "3"))
    # 3 beats 1 and 2 and ties with the other 3, which needs no question.
    assert [one["reward"] for one in got] == pytest.approx([0, 2.5 / 3, 1 / 3, 2.5 / 3])
    assert len(line.questions) == 2 * (6 - 1)
    assert all(one["consistent"] == 1 for one in got)
    biased = Scripted(lambda text, number: "Verdict: A")  # always the first: nobody wins
    got = run(biased, "judge_pairs", texts("1", "2", "3"))
    assert got == [{"reward": 0.5, "consistent": 0.0}] * 3
    ring = Scripted(compare)
    run(ring, "judge_pairs", texts(*map(str, range(16))), opponents=2)
    assert len(ring.questions) == 2 * 16 * 2
    assert run(ring, "judge_pairs", texts("1")) == [{"reward": 0.5}]
    assert len(ring.questions) == 64


# --- through a worker ---------------------------------------------------------------------------------------------

OWN = """
import time
from relaxd.rewards import judge

async def score(sample):
    value = await judge.ask(sample.response, read=float)
    if sample.response == "7":
        time.sleep(1000)
    return value
"""


async def test_samples_of_a_group_are_asked_about_at_once_outside_of_the_deadline(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))
    waiting, go, asked = 0, asyncio.Event(), []

    async def reply(question: AskRequest) -> AskResponse:
        nonlocal waiting
        text = question.messages[0].content[0].text
        asked.append(text)
        waiting += 1
        if waiting == 5:
            go.set()  # all five are open at the same time
        await go.wait()
        if text == "refused":
            raise JudgeError("it is asleep")
        return AskResponse(text=text)

    pool = WorkerPool(1, RewardConfig(name="own:score"), reply)
    try:
        samples = texts("1", "2", "nonsense", "refused", "5")
        outcomes = await pool.score("", samples, timeout_seconds=5.0)
        assert [outcomes[number] for number in (0, 1, 4)] == [RewardOutput(1.0), RewardOutput(2.0), RewardOutput(5.0)]
        assert isinstance(outcomes[2], Failure)
        assert outcomes[2].reason.startswith("3 replies of the judge could not be read: could not convert")
        assert outcomes[3] == Failure("it is asleep")
        assert asked.count("nonsense") == 3

        # A slow judge is not a slow reward, and a sample that hangs costs the others nothing.
        seconds = 0.5 * PATIENCE

        async def slowly(question: AskRequest) -> AskResponse:
            await asyncio.sleep(1.4 * seconds)  # a judge that takes longer than the reward's deadline
            return AskResponse(text=question.messages[0].content[0].text)

        pool._ask = slowly
        pool.reload()
        outcomes = await pool.score("", texts("7", "8"), timeout_seconds=seconds)
        assert outcomes[1] == RewardOutput(8.0)
        assert isinstance(outcomes[0], Failure)
        assert f"scoring a sample took longer than {seconds:g} s (at " in outcomes[0].reason
    finally:
        pool.close()


# --- a server -----------------------------------------------------------------------------------------------------


class Server:
    """A server of chat completions whose answers a test decides."""

    def __init__(self) -> None:
        self.port = free_port()
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self.answer: Callable[[int], web.Response] = lambda number: said("Score: 8")
        self.models: Callable[[], web.Response] = lambda: web.json_response({"data": []})
        self.runner: web.AppRunner | None = None

    async def serve(self) -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._list)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port).start()

    async def stop(self) -> None:
        if self.runner is not None:
            await self.runner.cleanup()

    async def _complete(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        self.headers.append(request.headers.get("Authorization", ""))
        return self.answer(len(self.bodies))

    async def _list(self, request: web.Request) -> web.Response:
        return self.models()


def said(text: str | None) -> web.Response:
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return web.json_response({"choices": [choice], "usage": {"prompt_tokens": 12, "completion_tokens": 3}})


QUESTION = AskRequest(seed=5)
QUESTION.messages.add(role="user").content.add(text="How good?")


@pytest.fixture
async def place(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Server, Callable[..., JudgeClient]]]:
    monkeypatch.setattr(patience, "PAUSE", Backoff(0.01, 0.02))
    monkeypatch.setattr(patience, "PROBE_PAUSE", Backoff(0.01, 0.05))
    server = Server()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(server.stop)

        def client(key: str | None = KEY, **settings: Any) -> JudgeClient:
            config = judge_config(server, **settings)
            made = JudgeClient(config, ChatCompletions(config, key))
            stack.push_async_callback(made.close)
            return made

        yield server, client


def judge_config(server: Server, **settings: Any) -> JudgeConfig:
    return JudgeConfig(
        **{"model": "gpt", "address": f"http://127.0.0.1:{server.port}/v1/", "timeout_seconds": 5.0, **settings}
    )


async def test_a_server_is_asked_with_model_sampling_and_key(place):
    server, client = place
    await server.serve()
    judge = client(max_new_tokens=7, temperature=0.5, top_k=3, chat_template_arguments={"enable_thinking": False})
    await judge.start()
    reply = await judge.ask(QUESTION)
    assert (reply.text, reply.prompt_tokens, reply.tokens, reply.finish_reason) == ("Score: 8", 12, 3, 1)
    assert server.headers == [f"Bearer {KEY}"]
    assert server.bodies == [
        {
            "model": "gpt",
            "messages": [{"role": "user", "content": "How good?"}],
            "max_tokens": 7,
            "temperature": 0.5,
            "seed": 5,
            "top_k": 3,
            "chat_template_kwargs": {"enable_thinking": False},
        }
    ]
    server.answer = lambda number: said(None)  # it has only thought
    assert (await judge.ask(QUESTION)).text == ""


def asking_with(kind: str, uri: str) -> AskRequest:
    """Return a question whose second message has text and an item."""
    messages = [
        {"role": "system", "content": "Judge."},
        {"role": "user", "content": [{"type": "text", "text": "What?"}, {"type": kind, "uri": uri}]},
    ]
    return AskRequest(messages=to_proto(messages))


async def test_a_server_gets_the_images_of_a_question_as_data_uris(place):
    server, client = place
    await server.serve()
    picture = data_uri(encoded(Image.new("RGB", (8, 8), "red")))
    assert (await client().ask(asking_with("image", picture))).text == "Score: 8"
    parts = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": picture}}]
    assert server.bodies[0]["messages"] == [{"role": "system", "content": "Judge."}, {"role": "user", "content": parts}]


@pytest.mark.parametrize(
    ("kind", "uri", "found"),
    [
        ("image", "sha256:0f", "an image at 'sha256:...'"),
        ("image", "http://me:secret@example.com/a.png", "an image at 'http:...'"),
        ("audio", "data:audio/wav;base64,", "audio"),
        ("video", "sha256:0f", "video"),
    ],
)
async def test_what_a_judge_cannot_see_is_refused_by_name(place, kind, uri, found):
    server, client = place
    await server.serve()
    problem = f"{re.escape(f'messages[1].content[1] is {found}')}: a judge at an address reads text, and images as data"
    with pytest.raises(JudgeError, match=problem):
        await client().ask(asking_with(kind, uri))
    assert server.bodies == []
    with pytest.raises(InvalidArgument) as refused:
        parse_messages(asking_with(kind, uri))
    assert refused.value.violations == (
        ("messages[1].content[1]", f"is {kind}: it must be text, which is all that judges read"),
    )


@pytest.mark.parametrize("status", [401, 403])
async def test_a_refused_key_fails_the_start_without_being_shown(place, status, caplog):
    server, client = place
    await server.serve()
    server.models = lambda: web.Response(status=status, text=f"no: {KEY}")
    with pytest.raises(MismatchError, match=r"refuses the key in RELAXD_JUDGE_KEY") as refused:
        await client().start()
    with pytest.raises(MismatchError, match=r"it wants a key: set RELAXD_JUDGE_KEY"):
        await client(key=None).start()
    server.answer = lambda number: web.Response(status=status)
    with pytest.raises(JudgeError, match=rf"HTTP {status}: it refuses the key"):
        await client().ask(QUESTION)
    assert KEY not in str(refused.value) + caplog.text


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda number: web.Response(status=400, text="too long"), "HTTP 400: 'too long'"),
        (lambda number: web.Response(status=302, headers={"Location": "http://127.0.0.1:1/"}), "HTTP 302"),
        (lambda number: web.Response(text="hello"), "its answer is no chat completion: 'hello'"),
        (lambda number: web.json_response({"choices": []}), "no chat completion"),
        (lambda number: web.json_response([1]), "no chat completion"),
        (lambda number: web.Response(text="[" * 100_000), "no chat completion"),
    ],
)
async def test_an_answer_that_is_none_fails_its_question(place, answer, message):
    server, client = place
    await server.serve()
    server.answer = answer
    with pytest.raises(JudgeError, match=message) as failed:
        await client().ask(QUESTION)
    assert len(server.bodies) == 1
    assert f"the judge at http://127.0.0.1:{server.port}/v1" in str(failed.value)


async def test_a_busy_server_is_asked_again_and_a_silent_one_is_not(place):
    server, client = place
    await server.serve()
    server.answer = lambda number: web.Response(status=(429, 503)[number - 1]) if number < 3 else said("Score: 1")
    assert (await client().ask(QUESTION)).text == "Score: 1"
    assert len(server.bodies) == 3

    async def silent(request: web.Request) -> web.Response:
        await asyncio.sleep(30)
        return said("late")

    other = Server()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", silent)
    other.runner = web.AppRunner(app, shutdown_timeout=0.1)
    await other.runner.setup()
    await web.TCPSite(other.runner, "127.0.0.1", other.port).start()
    config = judge_config(other, timeout_seconds=0.2)
    judge = JudgeClient(config, ChatCompletions(config, None))
    try:
        with pytest.raises(JudgeError, match=r"no reply within 0.2 s"):
            await judge.ask(QUESTION)
    finally:
        await judge.close()
        await other.stop()


async def test_an_outage_is_waited_for_by_name_and_has_an_end(place):
    server, client = place
    judge = client()
    await judge.start()  # the server isn't there yet
    asked = asyncio.create_task(judge.ask(QUESTION))
    await eventually(lambda: judge.pieces >= 2, "probes")
    assert f"the judge at http://127.0.0.1:{server.port}/v1 does not answer, for" in judge.detail
    assert not asked.done()
    await server.serve()
    assert (await asked).text == "Score: 8"
    assert judge.detail == ""
    await server.stop()
    impatient = client(outage_seconds=0.1)
    await impatient.start()
    with pytest.raises(JudgeError, match=r"does not answer, for 0 s now"):
        await impatient.ask(QUESTION)


async def test_questions_are_limited(place):
    server, client = place
    await server.serve()
    judge = client(questions_per_second=20.0)
    started = time.monotonic()
    await asyncio.gather(*(judge.ask(QUESTION) for _ in range(5)))
    assert time.monotonic() - started >= 4 / 20.0


@each(
    ("per_second", "events", "pauses"),
    [
        (0.0, ["begin", "begin"], [0, 0]),
        (2.0, ["begin", "begin", 0.25, 0.25, "begin"], [0.5, 0.5, 0.25, 0, 0.5]),
        (0.5, ["begin", 1, 1, "begin"], [2, 1, 0, 2]),
        (2.0, [10, "begin", "begin"], [0, 0.5, 0.5]),  # turns that nobody took aren't made up for
        (0.0, [("hold", 3), 1, 2], [3, 2, 0]),
        (0.0, [("hold", 3), ("hold", 1), 2, ("hold", 4)], [3, 3, 1, 4]),  # the longest counts
        (2.0, ["begin", ("hold", 0), ("hold", 3), 3, "begin"], [0.5, 0.5, 3, 0, 0.5]),
    ],
)
def test_questions_begin_at_even_intervals_and_not_before_the_judge_wants_them(per_second, events, pauses):
    now = 100.0
    pace = Pace(per_second, lambda: now)
    found = []
    for event in events:
        if event == "begin":
            pace.begin()
        elif isinstance(event, tuple):
            pace.hold(event[1])
        else:
            now += event
        found.append(pace.pause())
    assert found == pauses


@each(
    ("value", "seconds"),
    [
        (None, 0),
        ("7", 7),
        ("-7", 0),
        ("Wed, 21 Oct 2015 07:28:30 GMT", 30),
        ("Wed, 21 Oct 2015 07:28:30 -0000", 30),
        ("Wed, 21 Oct 2015 07:27:00 GMT", 0),
        ("soon", 0),
    ],
)
def test_retry_after_is_a_number_or_a_date(value, seconds):
    assert retry_after(value, datetime(2015, 10, 21, 7, 28, tzinfo=UTC)) == seconds


async def test_no_question_begins_before_the_judge_wants_one(place):
    server, client = place
    await server.serve()
    begun: list[float] = []

    def answer(number: int) -> web.Response:
        begun.append(time.monotonic())
        return said("Score: 1") if number > 1 else web.Response(status=429, headers={"Retry-After": "1"})

    server.answer = answer
    judge = client()
    first = asyncio.create_task(judge.ask(QUESTION))
    reasons = await eventually(lambda: [str(wait) for wait in waits() if "Retry-After" in wait.reason], "a named wait")
    second = asyncio.create_task(judge.ask(QUESTION))
    assert {reply.text for reply in await asyncio.gather(first, second)} == {"Score: 1"}
    assert reasons == [f"the judge at http://127.0.0.1:{server.port}/v1, which answered Retry-After"]
    assert len(begun) == 3
    assert min(begun[1:]) - begun[0] >= 0.9

    server.answer = lambda number: (
        said("Score: 2") if number > 4 else web.Response(status=503, headers={"Retry-After": "9999"})
    )
    assert (await client(outage_seconds=0.1).ask(QUESTION)).text == "Score: 2"  # no longer than that


async def test_a_trial_asks_a_server_but_no_replicas(place, tmp_path: Path, monkeypatch):
    server, _ = place
    await server.serve()
    reward = RewardConfig(name="judge")
    result = await try_reward(reward, [SAMPLE], 1, judge_config(server))
    assert result["outcomes"][0]["reward"] == 0.8
    (outcome,) = (await try_reward(reward, [SAMPLE], 1, JudgeConfig(model="big")))["outcomes"]
    assert outcome["asks_judge"]
    (outcome,) = (await try_reward(reward, [SAMPLE], 1))["outcomes"]
    assert not outcome["asks_judge"]
    assert "there is no judge: set roles.judge.model" in outcome["error"]
    assert json.dumps(result)


async def test_a_reward_asks_the_judge_by_its_call_not_by_the_words_of_its_error(tmp_path: Path, monkeypatch):
    (tmp_path / "words.py").write_text(
        "from relaxd.rewards.judge import JudgeError\nfrom services.reward.reward_trial import NOT_YET\n\n\n"
        "def score(sample):\n    raise JudgeError(NOT_YET)\n"
    )
    reward = RewardConfig(name=f"{tmp_path}/words.py:score", sandbox="off")
    (outcome,) = (await try_reward(reward, [SAMPLE], 1, JudgeConfig(model="big")))["outcomes"]
    assert (outcome["error"], outcome["asks_judge"]) == (NOT_YET, False)


async def test_asking_without_reading_returns_the_text():
    connect(Scripted(lambda text, number: f"you said {text}"))
    try:
        assert await ask([{"role": "user", "content": "hello"}]) == "you said hello"
    finally:
        connect(None)
