"""Chat templates, which turn messages into the model's text format."""

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from relaxd.data.errors import DataError
from relaxd.data.examples import Message


class ChatTemplate:
    """A compiled Jinja chat template, rendered as transformers renders it."""

    def __init__(
        self, source: str, special_tokens: dict[str, str], field: str, arguments: Mapping[str, Any] | None = None
    ) -> None:
        """`field` is the setting that the template comes from, `arguments` are variables for it.

        Raises DataError: it isn't valid Jinja.
        """
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        self._variables = {**special_tokens, **(arguments or {})}
        self._takes_tools = "tools" in source
        self._field = field
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise DataError(field, f"the chat template is invalid in line {error.lineno}: {error.message}") from error

    def render(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> str:
        """Render a conversation up to the start of the assistant's answer, with the tools that the model may call.

        Raises DataError if the template rejects these messages, or knows no tools.
        """
        if tools and not self._takes_tools:
            raise DataError(
                self._field,
                "there are tools (data.tools_key or tools_file), but the chat template has no place for tools",
            )
        variables = {"add_generation_prompt": True, "tools": tools or None, **self._variables}
        try:
            return self._template.render(messages=messages, **variables)
        except (jinja2.TemplateError, TypeError) as error:
            raise DataError(self._field, f"the chat template can't render this prompt: {error}") from error


def load_chat_template(
    folder: Path, override: str | None, arguments: Mapping[str, Any] | None = None
) -> ChatTemplate | None:
    """Load a model's chat template, or `override` if given, with arguments. Returns None if the model has none."""
    config_file = folder / "tokenizer_config.json"
    config: dict[str, Any] = json.loads(config_file.read_text()) if config_file.is_file() else {}
    special = {name: _content(config.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    if override is not None:
        return ChatTemplate(override, special, "model.chat_template", arguments)
    template_file = folder / "chat_template.jinja"
    if template_file.is_file():
        return ChatTemplate(template_file.read_text(), special, "model.path", arguments)
    source = config.get("chat_template")
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    return ChatTemplate(source, special, "model.path", arguments) if source else None


def _content(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else token or ""


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
