"""Writes the reference in docs/python.md from docstrings: `.venv/bin/python docs/python.py`."""

import ast
import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import relaxd
from relaxd import api
from relaxd.config.load_toml import ConfigError

PAGE = Path(__file__).with_suffix(".md")
MARK = "## Reference\n"
"""The line from which the page is written anew; what is above is written by hand."""
LISTS = ("Args:", "Raises:")


def page() -> str:
    """Return the page."""
    text = PAGE.read_text().partition(MARK)[0] + MARK
    text += f"\nWritten from docstrings, most of them in [`relaxd/api.py`](../relaxd/{Path(api.__file__).name}).\n"
    for function in (relaxd.configure, relaxd.run, relaxd.open_run, relaxd.log_metric, relaxd.notify):
        text += _section(f"relaxd.{function.__name__}", function)
    for shown in (relaxd.Run, relaxd.RunError, ConfigError):
        text += _section(shown.__name__, shown)
    return text + "".join(_section(f"Run.{name}", member) for name, member in vars(api.Run).items() if _is_shown(name))


def _is_shown(name: str) -> bool:
    return not name.startswith("_")


def _section(name: str, shown: Any) -> str:
    """Return a name's heading, signature and docstring."""
    called = "" if isinstance(shown, property | type) else f"```python\n{_signature(name, shown)}\n```\n\n"
    return f"\n### `{name}`\n\n{called}{_body(shown)}\n"


def _signature(name: str, shown: Callable[..., Any]) -> str:
    """Return a function's signature as its source has it, which no version of Python writes differently."""
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(shown))).body
    assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    function.args.args = [each for each in function.args.args if each.arg != "self"]
    return f"{name}({ast.unparse(function.args)})"


def _body(shown: Any) -> str:
    """Return a docstring as Markdown: its lists of arguments and errors as bullets."""
    lines: list[str] = []
    in_list = False
    for line in (inspect.getdoc(shown) or "").splitlines():
        if line in LISTS:
            in_list = True
            lines += [line, ""]
        elif in_list and line.startswith(5 * " "):  # a line continued
            lines[-1] += f" {line.strip()}"
        elif in_list and line:
            name, _, meaning = line.strip().partition(": ")
            lines.append(f"- `{name}`: {meaning}")
        else:
            lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
