"""Conversations that programs lead: real processes and requests, with a scripted engine."""

import subprocess
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from relaxd.data.examples import Example
from relaxd.data.tokenizer import PromptTokenizer
from relaxd.rpc.errors import InvalidArgument
from relaxd.sandbox import privileges
from relaxd.v1.rollout_pb2 import GenerateRequest
from services.agent.chat_session import ChatSession
from services.agent.conversation import Conversation
from services.agent.engines import OutOfTime
from services.agent.group_conversations import columns_of
from services.agent.program_conversations import Programs
from tests.integration.agent.program_kit import (
    CALLS,
    EXAMPLE,
    SUMS,
    check_tokens,
    config_of,
    holding,
    tokenizer,
)
from tests.integration.agent.scripted_engines import STOP, Fleet, encode
from tests.kit.models import byte_tokenizer
from tests.kit.processes import start_python
from tests.kit.waiting import wait_until

__all__ = ["tokenizer"]


@pytest.mark.parametrize(
    ("what", "texts"),
    [
        ("loop", [CALLS, SUMS]),
        ("messages", [f"<think>Add.</think>{CALLS}", SUMS]),
        pytest.param("thread", [CALLS, SUMS], marks=pytest.mark.night),
        ("responses", [f"<think>Add.</think>{CALLS}", SUMS, "Yes."]),
    ],
)
async def test_a_tool_loop_is_trained_on_the_engines_tokens(
    tokenizer: PromptTokenizer, what: str, texts: list[str]
) -> None:
    fleet = Fleet(texts, versions=[3])
    async with holding(tokenizer, fleet, what) as held:
        result = await held.hold()
    assert result.failure == ""
    assert (result.finish, result.turns, result.reward) == ("env_done", len(texts), 1.0)
    assert result.info == {"calls": 2.0}
    added = check_tokens(fleet, texts, result)
    assert '"name": "add"' in byte_tokenizer().decode(added[0])
    turns = "".join(f"<|im_start|>tool\n{answer}<|im_end|><|im_end|>\n" for answer in (5, 9))
    assert byte_tokenizer().decode(added[1]) == f"\n{turns}<|im_start|>assistant\n"
    assert added[1].count(STOP) == 2  # those of the turns; the program's are plain text
    roles = " ".join(message["role"] for message in result.messages)
    assert roles.removeprefix("system user ").startswith("assistant tool tool assistant")


class UpdatedFleet(Fleet):
    """A fleet whose engine gets new weights before each request, and has another reply to each."""

    def reply_to(self, request: GenerateRequest) -> list[int]:
        self.engines[0].version += 1
        return [*encode(next(self._texts)), STOP]


async def test_requests_that_continue_no_history_begin_others(tokenizer: PromptTokenizer) -> None:
    """A sub-agent, a compaction and a second answer are sequences; each generated token is trained on in one."""
    texts = ["one", "two<|im_end|>", "three", "four", "five", "six"]
    fleet = UpdatedFleet(texts, versions=[0])
    async with holding(tokenizer, fleet, "branch") as held:
        result = await held.hold()
        published = held.model.tokenizer.encode([EXAMPLE])[0].tolist()
    assert (result.failure, result.finish, result.turns, result.reward) == ("", "env_done", 6, 0.5)
    prompts = [list(request.prompt_tokens) for request in fleet.requests]
    replies = [[*encode(text), STOP] for text in texts]
    assert prompts[0] == published
    assert prompts[4] == prompts[3]
    assert len({request.sampling.seed for request in fleet.requests}) == 6
    observed = [prompts[later][len(prompts[first] + replies[first]) :] for first, later in ((0, 2), (3, 5))]
    assert all(prompts[later][: len(prompts[first])] == prompts[first] for first, later in ((0, 2), (3, 5)))
    parts = [  # of each sequence: tokens, and the request that wrote them, or -1
        [(replies[0], 0), (observed[0], -1), (replies[2], 2)],
        [(prompts[1], -1), (replies[1], 1)],
        [(prompts[3], -1), (replies[3], 3), (observed[1], -1), (replies[5], 5)],
        [(prompts[4], -1), (replies[4], 4)],
    ]
    columns = columns_of([Conversation(finish="timeout"), result], masked=False)
    assert columns["sample_of_sequence"].tolist() == [0, 1, 1, 1, 1]
    assert columns["shares_prompt"].tolist() == [1, 1, 0, 0, 0]
    assert columns["lengths"].tolist() == [0, *(sum(len(part) for part, _ in one) for one in parts)]
    every = [(token, by) for one in parts for part, by in one for token in part]
    assert columns["tokens"].tolist() == [token for token, _ in every]
    assert columns["loss_mask"].tolist() == [int(by >= 0) for _, by in every]
    assert columns["rollout_logprobs"].tolist() == [-float(token) if by >= 0 else 0.0 for token, by in every]
    written = columns["versions"][columns["loss_mask"] == 1].tolist()
    assert written == [by + 1 for _, by in every if by >= 0]
    assert columns["spans_weight_update"].tolist() == [0, 1, 0, 1, 0]
    assert columns["finish"] == ["timeout", *["env_done"] * 4]
    assert columns["text"][-1] == "six"
    said = [message["content"] for message in result.messages if message["role"] == "assistant"]
    assert said == ["one", "two<|im_end|>", "three", "So far three", "four", "five", "six"]


async def test_token_ids_continue_what_the_engine_wrote(tokenizer: PromptTokenizer, tmp_path: Path) -> None:
    texts = ["one", "two", "three", "four"]
    fleet, refusals = Fleet(texts, versions=[3]), tmp_path / "refusals"
    async with holding(tokenizer, fleet, "tokens") as held:
        result = await held.hold(Example(EXAMPLE.prompt, "", {"refusals": str(refusals)}))
    assert (result.failure, result.finish, result.turns, result.reward) == ("", "env_done", 4, 0.5)
    assert refusals.read_text().split("\n") == [
        "400 token_ids",
        "400 token_ids[5]",
        "400 features",
        "400 sampling_params.n",
        "400 sampling_params.max_tokens",
        "400 sampling_params.logprobs",
    ]
    one, two, three, four = ([*encode(text), STOP] for text in texts)
    more = tokenizer.encode_text("<|im_start|>And?")
    assert fleet.requests[1].sampling.max_new_tokens == 100
    assert list(fleet.requests[1].sampling.stop_token_ids) == [7]
    first, other = result.sequences.values()
    assert first.tokens.tolist() == [*one, *more, *two[:-1], more[0], *more, *three]
    assert other.tokens.tolist() == [*more, *four]
    parts = [(one, 1), (more, 0), (two[:-1], 1), ([more[0], *more], 0), (three, 1)]
    assert first.loss_mask.tolist() == [mask for part, mask in parts for _ in part]
    assert first.logprobs.tolist() == [
        -float(token) * by for token, by in zip(first.tokens, first.loss_mask, strict=True)
    ]
    assert (first.shares_prompt, other.shares_prompt) == (True, False)
    assert other.loss_mask.tolist() == [0] * len(more) + [1] * len(four)
    said = [(message["role"], message["content"]) for message in result.messages]
    added = [("user", "<|im_start|>And?"), ("user", "<|im_start|><|im_start|>And?"), ("user", "<|im_start|>And?")]
    assert said == [
        ("assistant", "one"),
        *(pair for new, text in zip(added, texts[1:], strict=True) for pair in (new, ("assistant", text))),
    ]


@pytest.mark.parametrize(
    ("what", "agent", "failure", "finish", "turns"),
    [
        ("fail", {}, "the program ended with exit code 1; the end of its output:\nxxx", "env_failed", 1),
        ("silent", {}, "exit code 0, but never asked the model; the end of its output:\nnothing", "env_failed", 0),
        ("bad_result", {}, "(RELAXD_RESULT) can't be used: reward is 'good' (str): it must be", "env_failed", 1),
        (
            "change",
            {"max_sequences": 1},
            'messages[1] isn\'t as it was: from character 0 on its content is \\"else\\", and was \\"5 and 9\\": this '
            "would begin another history, and the sample has agent.max_sequences = 1 already",
            "env_failed",
            1,
        ),
        ("talk", {"max_turns": 1}, "", "turns", 1),
    ],
    ids=["fails", "never asks", "writes a bad result", "changes history", "reaches a limit"],
)
async def test_programs_end(
    tokenizer: PromptTokenizer, what: str, agent: dict[str, Any], failure: str, finish: str, turns: int
) -> None:
    async with holding(tokenizer, Fleet(["5 and 9"], versions=[3]), what, **agent) as held:
        result = await held.hold()
    assert failure in result.failure
    assert (result.finish, result.turns) == (finish, turns)
    assert len(result.failure) < 5000
    assert bool(result.failure) == bool(failure)
    if what == "fail":
        assert result.failure.endswith("no luck")
    if turns:
        (tokens,) = result.sequences.values()
        assert tokens.shares_prompt
        assert tokens.loss_mask.all()


async def test_a_key_of_another_session_is_refused(tokenizer: PromptTokenizer) -> None:
    fleet = Fleet(["5 and 9"], versions=[3])
    async with holding(tokenizer, fleet, "steal") as held:
        other = ChatSession(held.model, held.start(lambda: 100.0), Conversation())
        held.programs.endpoint.open(other)
        result = await held.hold(Example(EXAMPLE.prompt, "", {"key": other.key}))
    assert result.failure.startswith("the program ended with exit code 9; the end of its output:\n401 ")
    assert "invalid_api_key" in result.failure
    assert not fleet.requests


async def test_a_session_that_is_not_there_or_over_is_refused(tokenizer: PromptTokenizer) -> None:
    async with holding(tokenizer, Fleet([], versions=[3]), "silent") as held, aiohttp.ClientSession() as client:
        session, endpoint = ChatSession(held.model, held.start(lambda: 100.0), Conversation()), held.programs.endpoint
        address = endpoint.open(session)
        endpoint.close_session(session)
        for over in (address, address.replace(session.id, "none")):
            asked = {"messages": EXAMPLE.prompt}
            async with client.post(
                f"{over}/v1/chat/completions", json=asked, headers={"x-api-key": session.key}
            ) as got:
                assert (got.status, (await got.json())["error"]["code"]) == (404, "no_session")


async def test_a_program_that_hangs_ends_with_what_it_started(tokenizer: PromptTokenizer, tmp_path: Path) -> None:
    pid, result = tmp_path / "pid", Conversation()

    def seconds() -> float:
        return 0.0 if pid.exists() and pid.read_text() else 100.0

    async with holding(tokenizer, Fleet(["5 and 9"], versions=[3]), "hang") as held:
        with pytest.raises(OutOfTime):
            await held.conversations._converse(result, held.start(seconds, pid=str(pid)))
    assert result.turns == 1  # which is kept
    child = int(pid.read_text())
    wait_until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie", "the child's end")


async def test_a_command_that_is_not_there_refuses_the_start() -> None:
    config = config_of(["no-such-program", "x"])
    with pytest.raises(InvalidArgument, match=r'agent.command begins with "no-such-program", which is no program'):
        await Programs(config.agent).start()


PARENT = """
import os, subprocess, sys
command = [sys.executable, "-I", "-S", sys.argv[1], str(os.getpid()), "sleep", "3600"]
print(subprocess.Popen(command, stdout=subprocess.DEVNULL).pid, flush=True)
input()
"""


def test_a_program_ends_when_the_service_is_killed() -> None:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with start_python("-c", PARENT, privileges.__file__, **pipes) as parent:
        program = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    wait_until(lambda: not program.is_running() or program.status() == "zombie", "the program's end")
