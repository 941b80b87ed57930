"""Making of the tools of a file."""

from pathlib import Path
from typing import Any

from relaxd.data.tools_file import ToolEntry, ToolsFileError, read_tools
from relaxd.importing import ImportProblem, describe_error, import_own
from relaxd.rewards.tools.standins import provide_verl, tool_schema

METHODS = ("create", "execute", "calc_reward", "release")


def load_tools(path: Path) -> dict[str, Any]:
    """Return the tools of a file by name, made with their settings. Raises ToolsFileError."""
    entries = read_tools(path)
    try:
        provide_verl()
    except ImportError as error:
        raise ToolsFileError(str(error)) from error
    tools: dict[str, Any] = {}
    for entry in entries:
        tool = _made(entry, path)
        name = entry.name or str(getattr(tool, "name", ""))
        if not name or name in tools:
            raise ToolsFileError(f"{path}: {entry.class_name} is named {name!r}: a tool needs a name of its own")
        tools[name] = tool
    return tools


def _made(entry: ToolEntry, path: Path) -> Any:
    module, _, name = entry.class_name.rpartition(".")
    try:
        made_of = import_own(f"{module}:{name}")
        tool = made_of(config=entry.config, tool_schema=tool_schema(entry.schema) if entry.schema else None)
    except ImportProblem as problem:
        raise ToolsFileError(f"{path}: {problem}") from problem
    except Exception as error:  # a user's class may raise anything
        raise ToolsFileError(f"{path}: {entry.class_name} can't be made: {describe_error(error)}") from error
    if missing := [method for method in METHODS if not callable(getattr(tool, method, None))]:
        raise ToolsFileError(f"{path}: {entry.class_name} has no {', '.join(missing)}: it must be like verl's BaseTool")
    return tool
