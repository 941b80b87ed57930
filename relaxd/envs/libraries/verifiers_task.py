"""Tasks of verifiers' tasksets (version 0.4), without tools: their prompts, and their rewards and metrics."""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any
from uuid import uuid4

from relaxd.envs.environment import BadEnvironmentError, Environment, Reply, Sample, Step
from relaxd.importing import import_own

try:
    import verifiers.v1 as vf
    from verifiers.v1.runtimes import make_runtime
    from verifiers.v1.state import state_cls
    from verifiers.v1.utils.compile import resolve_runtime_config
    from verifiers.v1.utils.generic import concrete_type
    from verifiers.v1.utils.loaders import taskset_class
except ImportError as error:
    raise ImportError(f"{error}: install verifiers for the interpreter that agent.python names") from error


class VerifiersTask(Environment):
    """A task's prompt, and the score of the model's message. Numbers: metrics and rewards of the task, by name."""

    def __init__(self, taskset: str, *, config: Mapping[str, Any] | None = None, max_tasks: int = 10_000) -> None:
        """Load the taskset, once in a process.

        Args:
            taskset: name of an installed one, or "file.py:Class" or "package.module:Class".
            config: settings of the taskset.
            max_tasks: maximum number of tasks, the first ones; a taskset may have infinitely many.

        Raises BadEnvironmentError: it has no task, or has tools, which only a harness of verifiers can offer.
        """
        self._tasks = _tasks_of(taskset, json.dumps(dict(config or {}), sort_keys=True), max_tasks)
        self._runtime: Any = None

    async def open(self, sample: Sample) -> str:
        """Take the task with the number `idx` of the sample's metadata, or else one by its seed."""
        index = sample.metadata.get("idx", sample.seed % len(self._tasks))
        if not isinstance(index, int) or not 0 <= index < len(self._tasks):
            raise BadEnvironmentError(f"idx is {index!r}: the taskset has the tasks 0 to {len(self._tasks) - 1}")
        self._task = task = self._tasks[index]
        self._trace = vf.Trace(
            task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
            agent=vf.AgentInfo(config=vf.AgentConfig(runtime=vf.SubprocessConfig())),
            state=state_cls(type(task))(),
        )
        self._runtime = make_runtime(resolve_runtime_config(vf.SubprocessConfig(), task), name=uuid4().hex)
        self._runtime.env = dict(task.runtime_env())
        await self._runtime.start()
        await task.setup(self._trace, self._runtime)
        text = "\n\n".join(filter(None, (task.data.system_prompt, task.data.prompt_text)))
        self._add(vf.UserMessage(content=text))
        return text

    async def step(self, reply: Reply) -> Step:
        """Score the message, which ends the conversation."""
        self._add(vf.AssistantMessage(content=reply.text), sampled=True)
        trace, task = self._trace, self._task
        trace.is_completed = trace.ok = True
        await task.finalize(trace, self._runtime)
        await task.score(trace, self._runtime)
        scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        return Step(None, trace.reward, True, metrics | scores)

    async def close(self) -> None:
        """Remove what the task's runtime has."""
        if self._runtime is not None:
            await self._runtime.stop()

    def _add(self, message: Any, sampled: bool = False) -> None:
        nodes = self._trace.nodes
        nodes.append(vf.MessageNode(parent=len(nodes) - 1 if nodes else None, message=message, sampled=sampled))


@lru_cache(maxsize=1)
def _tasks_of(name: str, config: str, most: int) -> list[Any]:
    kind = import_own(name) if ":" in name else taskset_class(name)
    settings = concrete_type(kind, vf.TasksetConfig, origin=vf.Taskset) or vf.TasksetConfig
    taskset = kind(settings.model_validate(json.loads(config)))
    tasks = list(taskset.take(most))
    if not tasks:
        raise BadEnvironmentError(f"the taskset {name} has no task")
    if kind.toolsets(taskset.config) or any(task.NEEDS_CONTAINER or task.toolsets(task.config) for task in tasks):
        raise BadEnvironmentError(f"the taskset {name} has tools or needs a container, which its harness must offer")
    return tasks
