"""Functions of the tests, which lead conversations."""

import asyncio
import time
from pathlib import Path

import relaxd
from relaxd.envs.environment import Sample
from relaxd.envs.function_tools import FunctionTool
from relaxd.envs.own_function import Model


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
