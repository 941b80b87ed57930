"""Tasks of verifiers' tasksets (version 0.4), run by a harness of verifiers; `solve` is for agent.function.

The harness is an agent program, such as verifiers' bash loop, which verifiers starts for each conversation. It sends
model requests to verifiers, which forwards them to the conversation's endpoint.
"""

import asyncio
import threading
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack
from functools import cache
from typing import Any, TypeVar

from relaxd.envs.environment import BadEnvironmentError, Sample
from relaxd.envs.libraries.verifiers_task import load_tasks, scores_of, task_for, vf
from relaxd.envs.own_function import Model

try:
    from verifiers.v1.mcp import serve_shared
    from verifiers.v1.runtimes import runtime_is_local
except ImportError as error:
    raise ImportError(f"{error}: install verifiers for the interpreter that agent.python names") from error

Returned = TypeVar("Returned")
NO_KEY_VARIABLE = "RELAXD_NO_KEY"
"""Name of an environment variable that is never set, so that verifiers itself sends no key. The conversation's key is
sent as x-api-key."""


async def solve(
    sample: Sample,
    model: Model,
    taskset: str,
    *,
    config: Mapping[str, Any] | None = None,
    agent_config: Mapping[str, Any] | None = None,
    max_tasks: int = 10_000,
) -> tuple[float, dict[str, float]]:
    """Have a harness of verifiers solve the sample's task. Returns the task's reward, and its metrics and rewards by
    name.

    Args:
        sample: the sample; `idx` in its metadata chooses the task, or else its seed.
        model: the run's model.
        taskset: name of an installed taskset, or "file.py:Class" or "package.module:Class".
        config: settings of the taskset.
        agent_config: fields of verifiers' AgentConfig, such as harness, runtime and max_turns. By default the harness
            is "bash", a loop with a shell, and programs run as processes of this machine.
        max_tasks: maximum number of tasks: only the first ones are used, because a taskset may be infinite.

    Raises BadEnvironmentError if there is no such task, or verifiers reports an error.
    """
    found, tasks = load_tasks(taskset, config, max_tasks)
    settings = vf.AgentConfig.model_validate(
        {"harness": {"id": "bash"}, "runtime": {"type": "subprocess"}}
        | dict(agent_config or {})
        | {
            "model": "policy",
            "client": {
                "type": "eval",
                "base_url": model.base_url,
                "api_key_var": NO_KEY_VARIABLE,
                "headers": {"x-api-key": model.api_key},
            },
        }
    )
    trace = await _in_loop(_run(settings, found, task_for(sample, tasks)))
    if not trace.ok:
        told = [f"{error.type}: {error.message}" for error in trace.errors]
        raise BadEnvironmentError(told[-1] if told else f"verifiers stopped the task: {trace.stop_condition}")
    return trace.reward, scores_of(trace)


async def _run(settings: Any, taskset: Any, task: Any) -> Any:
    tools = await _shared_tools(taskset, runtime_is_local(settings.runtime))
    async with vf.make_agent(settings) as agent:
        return await agent.run(task, tools=tools)


_serving: dict[Any, tuple[AsyncExitStack, Mapping[str, Any]]] = {}
"""Running tool servers that the tasks of a taskset share, by taskset. They are kept until this process ends."""
_starting = asyncio.Lock()
"""Lock held while tool servers start. It belongs to the event loop in which all tasks run."""


async def _shared_tools(taskset: Any, is_local: bool) -> Mapping[str, Any]:
    toolsets = taskset.toolsets(taskset.config)
    async with _starting:
        if toolsets and taskset not in _serving:
            stack = AsyncExitStack()
            tools = await stack.enter_async_context(serve_shared(toolsets, harness_is_local=is_local))
            _serving[taskset] = stack, tools
    return _serving[taskset][1] if toolsets else {}


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop in which all tasks run. Tasks share verifiers' locks, so they can't use the separate loop
    of each function."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="verifiers", daemon=True).start()
    return loop


async def _in_loop(work: Coroutine[Any, Any, Returned]) -> Returned:
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, _loop()))
