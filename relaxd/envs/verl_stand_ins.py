"""Stand-ins for the verl modules that tool files import, for use without verl."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any
from uuid import uuid4

from pydantic import BaseModel, Field


class OpenAIFunctionPropertySchema(BaseModel):
    """The schema of a parameter."""

    type: str | list[str]
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(BaseModel):
    """The schema of parameters."""

    type: str
    properties: dict[str, OpenAIFunctionPropertySchema]
    required: list[str] = Field(default_factory=list)


class OpenAIFunctionSchema(BaseModel):
    """The schema of a function."""

    name: str
    description: str
    parameters: OpenAIFunctionParametersSchema = Field(
        default_factory=lambda: OpenAIFunctionParametersSchema(type="object", properties={})
    )
    strict: bool = False


class OpenAIFunctionToolSchema(BaseModel):
    """The schema of a tool."""

    type: str
    function: OpenAIFunctionSchema


class ToolResponse(BaseModel):
    """Answer of a tool."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    def is_empty(self) -> bool:
        """Return True if the response is empty."""
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        """Return True if the response contains only text."""
        return bool(self.text) and not self.image and not self.video


class BaseTool:
    """The base class of tools."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        self.config = config
        self.tool_schema: Any = tool_schema or self.get_openai_tool_schema()
        assert self.tool_schema is not None, "Tool schema is not set!"
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> Any:
        """Return the tool's schema."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Begin a conversation. Returns its id and the tool's first answer."""
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Execute the call. Returns the answer, a step reward and metrics."""
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return the reward of a conversation as a whole."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End a conversation."""


def rollout_trace_op(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function without tracing."""
    return function


_SCHEMAS = (
    OpenAIFunctionPropertySchema, OpenAIFunctionParametersSchema, OpenAIFunctionSchema, OpenAIFunctionToolSchema,
    ToolResponse,
)  # fmt: skip
_MODULES: dict[str, tuple[Any, ...]] = {
    "verl": (),
    "verl.tools": (),
    "verl.tools.schemas": _SCHEMAS,
    "verl.tools.base_tool": (BaseTool, OpenAIFunctionToolSchema, ToolResponse),
    "verl.utils": (),
    "verl.utils.rollout_trace": (rollout_trace_op,),
}


def tool_schema(schema: dict[str, Any]) -> Any:
    """Convert a tool's schema to verl's class, or to its stand-in.

    Raises pydantic.ValidationError, and ImportError if verl is installed but can't be imported.
    """
    provide_verl()
    from verl.tools.schemas import OpenAIFunctionToolSchema as Schema

    return Schema.model_validate(schema)


def provide_verl() -> None:
    """Install the stand-ins unless verl is installed. Raises ImportError if verl is installed but can't be imported."""
    try:
        import verl.tools.base_tool  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "verl":
            raise ImportError(f"verl is installed, but verl.tools.base_tool can't be imported: {error}") from error
        for name, contents in _MODULES.items():
            module = ModuleType(name, "A stand-in of relaxd: verl isn't installed.")
            module.__path__ = []  # a package
            for one in contents:
                setattr(module, one.__name__, one)
            sys.modules[name] = module
