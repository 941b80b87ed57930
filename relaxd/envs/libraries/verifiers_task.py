"""Adapter for tasks of verifiers' tasksets (version 0.4) without tools: their prompts, rewards and metrics."""

import json
import threading
from collections.abc import Mapping, Sequence
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

_loading = threading.Lock()


class VerifiersTask(Environment):
    """Environment that shows the prompt of a verifiers task, and scores the model's message. Its metrics are the task's
    metrics and rewards, by name."""

    def __init__(self, taskset: str, *, config: Mapping[str, Any] | None = None, max_tasks: int = 10_000) -> None:
        """Load the taskset, once per process.

        Args:
            taskset: name of an installed taskset, or "file.py:Class" or "package.module:Class".
            config: settings of the taskset.
            max_tasks: maximum number of tasks: only the first ones are used, because a taskset may be infinite.

        Raises BadEnvironmentError if the taskset has no task, or needs tools or a container, which only a harness
        offers.
        """
        found, self._tasks = load_tasks(taskset, config, max_tasks)
        if found.toolsets(found.config) or any(one.NEEDS_CONTAINER or one.toolsets(one.config) for one in self._tasks):
            raise BadEnvironmentError(
                f"the taskset {taskset} has tools or needs a container, which a harness must offer: set "
                'agent.function = "relaxd.envs.libraries.verifiers_harness:solve" in place of agent.environment'
            )
        self._runtime: Any = None

    async def open(self, sample: Sample) -> str:
        """Set up the sample's task, which `idx` in its metadata or else its seed chooses. Returns the task's prompt."""
        self._task = task = task_for(sample, self._tasks)
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
        """Score the model's message, which ends the conversation."""
        self._add(vf.AssistantMessage(content=reply.text), sampled=True)
        trace, task = self._trace, self._task
        trace.is_completed = trace.ok = True
        await task.finalize(trace, self._runtime)
        await task.score(trace, self._runtime)
        return Step(None, trace.reward, True, scores_of(trace))

    async def close(self) -> None:
        """Stop the task's runtime and remove its resources."""
        if self._runtime is not None:
            await self._runtime.stop()

    def _add(self, message: Any, sampled: bool = False) -> None:
        nodes = self._trace.nodes
        nodes.append(vf.MessageNode(parent=len(nodes) - 1 if nodes else None, message=message, sampled=sampled))


def load_tasks(name: str, config: Mapping[str, Any] | None, max_tasks: int) -> tuple[Any, list[Any]]:
    """Return a taskset and its first tasks. They are loaded once per process.

    Args:
        name: name of an installed taskset, or "file.py:Class" or "package.module:Class".
        config: settings of the taskset.
        max_tasks: maximum number of tasks.

    Raises BadEnvironmentError if the taskset has no task.
    """
    with _loading:
        return _load_tasks(name, json.dumps(dict(config or {}), sort_keys=True), max_tasks)


@lru_cache(maxsize=1)
def _load_tasks(name: str, config: str, max_tasks: int) -> tuple[Any, list[Any]]:
    kind = import_own(name) if ":" in name else taskset_class(name)
    settings = concrete_type(kind, vf.TasksetConfig, origin=vf.Taskset) or vf.TasksetConfig
    taskset = kind(settings.model_validate(json.loads(config)))
    tasks = list(taskset.take(max_tasks))
    if not tasks:
        raise BadEnvironmentError(f"the taskset {name} has no task")
    return taskset, tasks


def task_for(sample: Sample, tasks: Sequence[Any]) -> Any:
    """Return the sample's task: its number is `idx` in the sample's metadata, or else follows from the sample's
    seed. Raises BadEnvironmentError if there is no such task."""
    index = sample.metadata.get("idx", sample.seed % len(tasks))
    if not isinstance(index, int) or not 0 <= index < len(tasks):
        raise BadEnvironmentError(f"idx is {index!r}: the taskset has the tasks 0 to {len(tasks) - 1}")
    return tasks[index]


def scores_of(trace: Any) -> dict[str, float]:
    """Return the metrics and rewards of a finished task's trace, by name."""
    scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    return {name: value for name, value in trace.metrics.items() if value is not None} | scores
