"""Agent libraries as programs of runs: their interpreters, settings and calls."""

import json
import os
from pathlib import Path
from typing import Any

from tests.integration.agent.program_kit import CALLS, SUMS

PROGRAMS = str(Path(__file__).with_name("library_programs.py"))
SOLVE = "relaxd.envs.libraries.verifiers_harness:solve"
TASKSET = "tests.integration.envs.verifiers_tasks:WithTools"
PACKAGES = {
    "agents": "openai-agents",
    "langgraph": "langchain, langgraph and langchain-openai",
    "verifiers": "verifiers 0.4, uv and relaxd's requirements",
}
WAYS = [
    *(("agents", way) for way in ("chat", "chat-streamed", "responses", "responses-streamed", "mcp")),
    *(("langgraph", way) for way in ("chat", "chat-streamed", "responses", "responses-streamed")),
]
"""Libraries, and ways in which they ask."""
TWO_CALLS = [f"<think>Add.</think>{CALLS}", SUMS]
"""Messages of the model for programs that add twice."""


def call(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


DOUBLED = [
    call("integers_double", {"number": 5}),
    call("bash", {"command": "echo $((5 * 2)) > sum.txt"}),
    "It is 10.",
]
"""Messages of the model for a task of verifiers."""


def verifiers_settings(**agent_config: int) -> dict[str, Any]:
    return {"taskset": TASKSET, "agent_config": {"harness": {"id": "bash", "edit": False}, **agent_config}}


def verifiers_variables(python: str) -> dict[str, str]:
    """Return what a service that hosts verifiers with this interpreter has in its environment; uv is beside it."""
    path = f"{Path(python).parent}:{os.environ['PATH']}"
    return {"PATH": path, "UV_PYTHON_DOWNLOADS": "never", "PYTHONPATH": os.getcwd()}
