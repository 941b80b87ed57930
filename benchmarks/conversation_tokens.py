"""Tokens of a conversation's new messages: `python -m benchmarks.conversation_tokens`.

Of conversations of 10, 40 and 100 turns, each a tool call of the model and the tool's answer: the processor's time of
`TokenHistory.add_messages` for the last turn, the same with Jinja's own sandbox, and a render and encoding of the whole
conversation, as a client does that keeps messages and not tokens. Median of rounds, by turns; the three take turns.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

from jinja2.sandbox import ImmutableSandboxedEnvironment

from benchmarks.reporting import report
from relaxd.data import templating
from relaxd.data.examples import Example
from relaxd.data.tokenizer import PromptTokenizer
from relaxd.envs.environment import ToolCall
from relaxd.envs.replies import PROBE_TOOLS, ParsedReply
from relaxd.envs.token_history import TokenHistory
from tests.kit.templates import template_tokenizer

TEMPLATES = ("qwen3", "qwen3_8", "llama3_1", "gptoss", "glm4moe")
TURNS = (10, 40, 100)
ANSWER = "some words of an answer that a tool gives, " * 8


def seconds_of(action: Callable[[], object]) -> float:
    begun = time.process_time()
    action()
    return time.process_time() - begun


def with_jinjas_sandbox(name: str) -> PromptTokenizer:
    """Return a template's tokenizer whose renders check each attribute each time, as Jinja's own sandbox does."""
    own, templating.TemplateSandbox = templating.TemplateSandbox, ImmutableSandboxedEnvironment  # type: ignore[misc]
    try:
        return template_tokenizer.__wrapped__(name)
    finally:
        templating.TemplateSandbox = own  # type: ignore[misc]


def measure(tokenizer: PromptTokenizer, turns: int) -> tuple[float, float]:
    """Return the seconds of the last turn's messages, and of the whole conversation."""
    example = Example([{"role": "user", "content": "What is 2 + 3?"}], tools=PROBE_TOOLS)
    history, messages, seconds = TokenHistory(tokenizer, example), list(example.messages), 0.0
    reply = ParsedReply(calls=(ToolCall("add", {"a": 2, "b": "3"}, id="call00001"),)).message
    answer = {"role": "tool", "content": ANSWER, "name": "add", "tool_call_id": "call00001"}
    sampled = tokenizer.encode_text('{"name": "add", "arguments": {"a": 2, "b": "3"}}')
    for _ in range(turns):
        history.add_reply(sampled, [0.0] * len(sampled), [0] * len(sampled), reply)
        seconds = seconds_of(lambda: history.add_messages([answer]))
        messages += [reply, answer]
    whole = Example(messages, tools=PROBE_TOOLS)
    return seconds, seconds_of(lambda: tokenizer.encode([whole]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    rows = []
    for name in TEMPLATES:
        tokenizer, slower = template_tokenizer(name), with_jinjas_sandbox(name)
        for turns in TURNS:
            measured = [(*measure(tokenizer, turns), measure(slower, turns)[0]) for _ in range(rounds)]
            added, whole, slow = (statistics.median(values) * 1e3 for values in zip(*measured, strict=True))
            row = {"template": name, "turns": turns, "add_messages ms": added, "whole ms": whole}
            rows.append({**row, "ratio": added / whole, "Jinja's sandbox ms": slow, "to it": added / slow})
    load = round(os.getloadavg()[0], 2)
    report("conversation-tokens", rows, load=load, rounds=rounds, time="of the processor", tokenizer="a small BPE")


if __name__ == "__main__":
    main()
