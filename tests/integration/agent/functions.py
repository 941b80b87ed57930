"""Functions of the tests, which lead conversations."""

import asyncio
import time
from pathlib import Path

import pytest

import relaxd
from relaxd.envs.environment import Sample
from relaxd.envs.function_tools import FunctionTool
from relaxd.envs.own_function import Model
from tests.integration.agent.galleries import OTHER, SHOWN, item
from tests.kit.vision import encoded


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


async def use_tools(sample: Sample, model: Model, paid: float = 1.0) -> tuple[float, dict[str, float]]:
    """Answer tool calls until the model calls none."""
    relaxd.notify("adding")
    messages, calls, tool = list(sample.messages), 0, FunctionTool(add)
    while True:
        answer = await model.generate(messages, tools=[tool.schema])
        messages.append(answer.message)
        if not answer.tool_calls:
            return paid * (answer.text == "They are 5 and 9."), {"calls": calls, "seed": sample.seed}
        calls += len(answer.tool_calls)
        for call in answer.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": await tool.answer(call)})


async def pictures(sample: Sample, model: Model) -> float:
    """Do as the programs of this name, with pictures of Pillow."""
    messages, shown = list(sample.messages), [*SHOWN[:3:2], OTHER]
    own = next(part for part in messages[0]["content"] if part["type"] == "image")
    first = {"type": "image", "image": shown[0]}
    second = {"type": "image", "image": encoded(shown[1])}
    for content in (["This?", first], [second, "Or?", own]):
        answer = await model.generate(messages)
        messages += [answer.message, {"role": "user", "content": content}]
    await model.generate(messages)
    other = {"type": "image", "image": shown[2]}
    await model.generate(
        [{"role": "user", "content": [other if part == own else part for part in messages[0]["content"]]}]
    )
    far = {"type": "image", "image": "https://example.com/a.png"}
    with pytest.raises(ValueError, match="relaxd fetches no media"):
        await model.generate([{"role": "user", "content": [far]}])
    return 1.0


async def items(sample: Sample, model: Model) -> float:
    """Show two items of the prompt's kind, then the prompt's in a history of its own."""
    kind = str(sample.metadata["kind"])
    messages = list(sample.messages)
    for seed in (2, 3):
        answer = await model.generate(messages)
        part = {"type": kind, kind: item(kind, seed)}
        messages += [answer.message, {"role": "user", "content": ["And ", part]}]
    await model.generate(messages)
    return 1.0


async def misbehave(sample: Sample, model: Model) -> object:
    """Do as the prompt's metadata says."""
    what = sample.metadata["what"]
    if what == "silent":
        return 1.0
    messages = [*sample.messages, (await model.generate(sample.messages)).message]
    match what:
        case "raise":
            raise RuntimeError("no luck")
        case "text":
            return "good"
        case "refused":
            await model.generate(messages)
        case "talk":
            while True:
                messages.append({"role": "user", "content": "more"})
                messages.append((await model.generate(messages)).message)
        case "block":
            Path(sample.metadata["mark"]).touch()
            time.sleep(5)  # longer than the conversation
        case "wait":
            Path(sample.metadata["mark"]).touch()
            try:
                await asyncio.sleep(600)  # idle: until it is cancelled
            finally:
                Path(sample.metadata["mark"]).unlink()
    return None


async def without_a_model(sample: Sample) -> float:
    """Lack an argument."""
    return 0.0


def not_async(sample: Sample, model: Model) -> float:
    """Be no coroutine."""
    return 0.0
