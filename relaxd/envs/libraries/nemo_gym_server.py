"""Adapter for tasks of NeMo Gym's resources servers (version 0.7): their tools, and their verification as reward."""

import json
import time
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

import aiohttp

from relaxd.envs.environment import BadEnvironmentError, Environment, Reply, Sample, Step, ToolCall, tool_message

PARAMETERS = "responses_create_params"
"""Key of a row under which a request of OpenAI's responses API is, with input and tools."""


class NemoGymServer(Environment):
    """A conversation with a resources server, which runs like NeMo Gym's simple_agent.

    Tool calls go to the server. The first message without a call makes the server verify the conversation. The metrics
    are the numbers that the verification returns.
    """

    def __init__(self, url: str, *, max_steps: int = 0) -> None:
        """Check the settings, without connecting to the server.

        Args:
            url: the server's address, such as "http://host:8000".
            max_steps: number of messages after which the conversation is verified in any case; 0: no limit.

        Raises ValueError if max_steps is negative.
        """
        if max_steps < 0:
            raise ValueError(f"max_steps is {max_steps}: it must be at least 0")
        self._url, self._max_steps, self._steps = url.rstrip("/"), max_steps, 0
        self._row: dict[str, Any] = {}
        self._output: list[dict[str, Any]] = []
        self._http: aiohttp.ClientSession | None = None

    async def open(self, sample: Sample) -> None:
        """Start a session on the server for the sample's row, and take the tools from the row."""
        answer = {"answer": sample.answer} if sample.answer else {}
        self._row = answer | dict(sample.metadata)
        parameters = self._row.get(PARAMETERS)
        if not isinstance(parameters, dict):
            raise BadEnvironmentError(
                f'the row has no {PARAMETERS}: set data.prompt_key = "{PARAMETERS}.input" for data of NeMo Gym, and '
                "leave out data.metadata_key"
            )
        functions = [one for one in parameters.get("tools") or [] if one.get("type") == "function"]
        self.tools = [{"type": "function", "function": _schema(one)} for one in functions]
        # The session is a cookie; agent.call_seconds is the limit of time.
        jar, limit = aiohttp.CookieJar(unsafe=True), aiohttp.ClientTimeout(total=None)
        self._http = aiohttp.ClientSession(cookie_jar=jar, timeout=limit)
        await self._checked("seed_session", self._row)

    async def step(self, reply: Reply) -> Step:
        """Call the tools of the model's message. Have the server verify the conversation after a message without calls,
        one that was cut off, or the last of `max_steps`."""
        self._steps += 1
        if reply.text or not reply.tool_calls:
            text = {"type": "output_text", "text": reply.text, "annotations": []}
            message = {"type": "message", "id": uuid4().hex, "role": "assistant", "status": "completed"}
            self._output.append({**message, "content": [text]})
        messages = []
        for call in reply.tool_calls:
            text_of_tool = await self._called(call)
            messages.append(tool_message(call, text_of_tool))
            arguments = json.dumps(call.arguments)
            self._output += [
                {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": arguments},
                {"type": "function_call_output", "call_id": call.id, "output": text_of_tool},
            ]
        if messages and reply.finish_reason != "length" and self._steps != self._max_steps:
            return Step(messages)
        result = await self._checked("verify", {**self._row, "response": self._response()})
        if "reward" not in result:
            raise BadEnvironmentError(f"{self._url}/verify answered without a reward: {_shown(result)}")
        if result.pop("mask_sample", False):  # the server's own failure, such as that of a judge
            raise BadEnvironmentError(f"{self._url}/verify has failed: {_shown(result.get('failure_reason'))}")
        reward = result.pop("reward")
        numbers = {name: float(one) for name, one in result.items() if isinstance(one, bool | int | float)}
        return Step(messages, reward, True, numbers)

    async def close(self) -> None:
        """Close the connection to the server."""
        if self._http is not None:
            await self._http.close()

    def _response(self) -> dict[str, Any]:
        """Return the conversation's messages, by model and tools, as a response in OpenAI's form."""
        parameters = self._row[PARAMETERS]
        return {
            "id": f"resp_{uuid4().hex}",
            "object": "response",
            "created_at": time.time(),
            "model": "policy",
            "status": "completed",
            "output": self._output,
            "tools": parameters.get("tools") or [],
            "tool_choice": parameters.get("tool_choice") or "auto",
            "parallel_tool_calls": parameters.get("parallel_tool_calls", True),
        }

    async def _called(self, call: ToolCall) -> str:
        """Have the server execute a tool call. Returns its answer or error as text for the model."""
        names = [one["function"]["name"] for one in self.tools]
        if call.name not in names:  # the model may not call the server's other addresses
            return f"Error: there is no tool {call.name!r}; there are {', '.join(names)}"
        return (await self._post(call.name, call.arguments))[1]

    async def _checked(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Post to a path of the server, and return the JSON object that it answers. Raises BadEnvironmentError if the
        answer is an error or no object."""
        status, text = await self._post(path, body)
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if status != 200 or not isinstance(found, dict):
            raise BadEnvironmentError(f"{self._url}/{path} answered {status}: {_shown(text)}")
        return found

    async def _post(self, path: str, body: Mapping[str, Any]) -> tuple[int, str]:
        assert self._http is not None
        try:
            async with self._http.post(f"{self._url}/{path}", json=body) as response:
                return response.status, await response.text()
        except aiohttp.ClientError as error:
            raise BadEnvironmentError(f"the NeMo Gym server {self._url} can't be reached: {error}") from error


def _schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the schema of a tool from the form of OpenAI's responses API to the form of chat templates."""
    kept = {name: function[name] for name in ("name", "description", "parameters") if function.get(name) is not None}
    return {"description": "", "parameters": {"type": "object", "properties": {}}} | kept


def _shown(value: object) -> str:
    return str(value)[:500]
