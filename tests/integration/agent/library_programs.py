"""`python library_programs.py WHAT`: unmodified agent libraries, each with a function tool."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

SAMPLE = json.loads(Path(os.environ["RELAXD_SAMPLE"]).read_text())
QUESTION = SAMPLE["messages"][0]["content"]


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first one
        b: the second one
    """
    return a + b


def agents(model: str, *, streamed: bool) -> Any:
    """Run an agent of openai-agents."""
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    kind = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}[model]
    asked = kind(model="any", openai_client=AsyncOpenAI())
    agent = Agent(name="adder", instructions="Use the tool.", tools=[function_tool(add)], model=asked)
    if not streamed:
        return Runner.run_sync(agent, QUESTION).final_output

    async def run() -> Any:
        result = Runner.run_streamed(agent, QUESTION)
        async for _ in result.stream_events():
            pass
        return result.final_output

    return asyncio.run(run())


def agents_with_mcp() -> Any:
    """Run an agent of openai-agents by streamed responses, whose tools are those of an MCP server."""
    from agents import Agent, OpenAIResponsesModel, Runner, set_tracing_disabled
    from agents.mcp import MCPServerStdio, MCPServerStdioParams, create_static_tool_filter
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    params = MCPServerStdioParams(command=sys.executable, args=["-m", "tests.kit.mcp_server"])

    async def run() -> Any:
        few = create_static_tool_filter(allowed_tool_names=["add"])
        async with MCPServerStdio(params, client_session_timeout_seconds=60, tool_filter=few) as server:
            asked = OpenAIResponsesModel(model="any", openai_client=AsyncOpenAI())
            result = Runner.run_streamed(
                Agent(name="adder", instructions="Use the tool.", mcp_servers=[server], model=asked), QUESTION
            )
            async for _ in result.stream_events():
                pass
            return result.final_output

    return asyncio.run(run())


def langgraph(*, responses: bool, streamed: bool) -> Any:
    """Run an agent of langgraph."""
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="any", use_responses_api=responses, streaming=streamed)
    agent = create_agent(model, tools=[add], system_prompt="Use the tool.")
    content = agent.invoke({"messages": [("user", QUESTION)]})["messages"][-1].content
    return content if isinstance(content, str) else content[-1]["text"]


PROGRAMS = {
    "agents-chat": lambda: agents("chat", streamed=False),
    "agents-chat-streamed": lambda: agents("chat", streamed=True),
    "agents-responses": lambda: agents("responses", streamed=False),
    "agents-responses-streamed": lambda: agents("responses", streamed=True),
    "agents-mcp": agents_with_mcp,
    "langgraph-chat": lambda: langgraph(responses=False, streamed=False),
    "langgraph-chat-streamed": lambda: langgraph(responses=False, streamed=True),
    "langgraph-responses": lambda: langgraph(responses=True, streamed=False),
    "langgraph-responses-streamed": lambda: langgraph(responses=True, streamed=True),
}

if __name__ == "__main__":
    text = str(PROGRAMS[sys.argv[1]]())
    Path(os.environ["RELAXD_RESULT"]).write_text(json.dumps({"reward": float(SAMPLE["answer"] in text)}))
