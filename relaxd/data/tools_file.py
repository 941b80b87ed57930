"""Reading of verl's file of tools (YAML), which gives each tool's class, settings and schema."""

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_KEYS = ("class_name", "config", "tool_schema")
_VARIABLE = re.compile(r"\$\{[^}]*\}")
WITHOUT_YAML = "{error}: a file of tools needs PyYAML (pip install 'relaxd[reward]')"


class ToolsFileError(ValueError):
    """A file of tools can't be read, or doesn't have verl's form. The message names the file and the tool."""


@dataclass(frozen=True)
class ToolEntry:
    """A tool in verl's file of tools."""

    class_name: str
    """Path of the tool's class, such as "package.module.Class"."""
    config: dict[str, Any] = field(default_factory=dict)
    """Settings for the constructor of the tool's class."""
    schema: dict[str, Any] | None = None
    """Schema of the tool in OpenAI's form, {"type": "function", "function": {"name": ..., ...}}; None: only the class
    has it."""

    @property
    def name(self) -> str:
        """Name by which a model calls the tool; "" if only the tool's class knows the name."""
        return str(self.schema["function"]["name"]) if self.schema else ""


def read_tools(path: Path) -> list[ToolEntry]:
    """Return the tools of a file, without importing their classes. Raises ToolsFileError if the file can't be used."""
    try:
        import yaml
    except ImportError as error:
        raise ToolsFileError(WITHOUT_YAML.format(error=error)) from error
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ToolsFileError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ToolsFileError(f"{path} is not YAML: {error}") from error
    entries = tree.get("tools") if isinstance(tree, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ToolsFileError(f"{path} has no tools: it must be as verl's is, with a list under `tools`")
    tools = [_entry(one, f"{path}, tool {number}") for number, one in enumerate(entries, 1)]
    names = [tool.name for tool in tools if tool.name]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ToolsFileError(f"{path} has the tool {min(twice)!r} twice: a model calls a tool by its name")
    return tools


def schemas_of(path: Path) -> list[dict[str, Any]]:
    """Return the schemas of a file's tools for a chat template. Raises ToolsFileError if the file can't be used, or a
    tool has no schema."""
    tools = read_tools(path)
    for number, tool in enumerate(tools, 1):
        if tool.schema is None:
            raise ToolsFileError(
                f"{path}, tool {number} ({tool.class_name}) has no tool_schema: prompts need it, and no class is "
                "imported for them"
            )
    return [tool.schema for tool in tools if tool.schema is not None]


def _entry(value: Any, place: str) -> ToolEntry:
    if not isinstance(value, dict):
        raise ToolsFileError(f"{place} is a {type(value).__name__}: it must have class_name, config and tool_schema")
    for key in value:
        if key not in _KEYS:
            near = difflib.get_close_matches(str(key), _KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(_KEYS)}"
            raise ToolsFileError(f"{place} has {key!r}: {hint}")
    if (found := next(_variables(value), None)) is not None:
        raise ToolsFileError(f"{place} has {found}, which is not resolved here: write its value")
    name, config, schema = value.get("class_name"), value.get("config") or {}, value.get("tool_schema")
    if not isinstance(name, str) or "." not in name:
        raise ToolsFileError(f'{place}: class_name is {name!r}: it must be a class, such as "package.module.Class"')
    if not isinstance(config, dict):
        raise ToolsFileError(f"{place}: config is a {type(config).__name__}: it must be a mapping")
    if config.get("type", "native") != "native":
        raise ToolsFileError(f"{place}: config.type is {config['type']!r}: only native tools are known")
    if schema is None:
        return ToolEntry(name, config)
    function = schema.get("function") if isinstance(schema, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ToolsFileError(f"{place}: tool_schema must have type, and function with name, description and parameters")
    return ToolEntry(name, config, {"type": "function", **schema})


def _variables(value: Any) -> Iterator[str]:
    """Yield the interpolations in a value, such as ${oc.env:KEY}, which hydra would resolve."""
    if isinstance(value, dict):
        for one in value.values():
            yield from _variables(one)
    elif isinstance(value, list):
        for one in value:
            yield from _variables(one)
    elif isinstance(value, str):
        yield from _VARIABLE.findall(value)
