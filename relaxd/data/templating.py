"""Chat templates, which convert messages to the model's text format. They are rendered as transformers renders them."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from relaxd.config import RunConfig
from relaxd.data.examples import Message
from relaxd.data.special_tokens import TOKENIZER_CONFIG, read_object, special_tokens
from relaxd.models import DataError

OVERRIDE = "model.chat_template"
"""Name of the setting with a chat template that replaces the model's own."""
JUDGE_OVERRIDE = "roles.judge.chat_template"
"""Name of the setting with a chat template that replaces the judge's own."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys under which a message may have its reasoning. Most templates read the first key, gpt-oss's the second."""
TEMPLATE_FILE = "chat_template.jinja"
"""Name of the file with a model's chat template. Older models have the template in their tokenizer's configuration."""
MORE_TEMPLATES = "additional_chat_templates"
"""Folder of a model's named chat templates, of which "tool_use" is for prompts with tools."""
END_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
PROBE = "relaxd-probe-of-a-chat-template"
DICT_ATTRIBUTES = frozenset(dir(dict))
"""Names of the attributes of Python's dict. An entry of the same name is hidden from templates."""


class Generation(Extension):
    """Jinja extension for the block {% generation %}, with which templates mark the assistant's text. The text stays
    unchanged."""

    tags = {"generation"}  # noqa: RUF012  jinja2 reads it from the class

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return str(caller())


class DictFunction:
    """The function dict() for templates, as in transformers. Templates don't get Python's class dict."""

    def __call__(self, *arguments: Any, **named: Any) -> dict[Any, Any]:
        return dict(*arguments, **named)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        return dict.fromkeys(*arguments)


class TemplateNamespace(jinja2.utils.Namespace):
    """The function namespace() for templates, as in transformers. It refuses private names."""

    def __init__(*arguments: Any, **named: Any) -> None:  # a template may name a value "self"
        attributes: dict[str, Any] = dict(*arguments[1:], **named)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(arguments[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a cache for its checks of attributes, which took most of the time of rendering."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._safe: dict[tuple[type, str], bool] = {}
        """Cached checks by the object's type and the attribute's name: True if templates may read the attribute."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is not dict or attribute in DICT_ATTRIBUTES:
            return super().getattr(obj, attribute)
        try:
            return obj[attribute]
        except KeyError:
            return self.undefined(obj=obj, name=attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        found = self._safe.get((type(obj), attr))
        if found is None:
            found = self._safe[type(obj), attr] = super().is_safe_attribute(obj, attr, value)
        return found


def _null_contents(messages: Sequence[Message]) -> str:
    """Return a hint for error messages that lists the messages whose content is null; "" if there are none. Templates
    that expect text fail on such messages with unclear errors."""
    null = [f"{index} ({message['role']})" for index, message in enumerate(messages) if message.get("content") is None]
    if not null:
        return ""
    return f'; content is null in message {", ".join(null)}: write "" if this template needs text there'


class ChatTemplate:
    """A model's chat template, compiled by Jinja, with its variables."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        field: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        with_tools: str | None = None,
        file: str = "",
    ) -> None:
        """Compile a chat template.

        Args:
            source: Jinja text of the template.
            special_tokens: the model's special tokens, as variables of the template.
            field: name of the setting that gives the template.
            arguments: further variables of the template.
            with_tools: Jinja text of the template for prompts with tools, if the model has a separate one.
            file: name of the file that has the template, for errors.

        Raises:
            DataError: the template isn't valid Jinja, or it ignores the messages.
        """
        self._variables = {**special_tokens, **(arguments or {})}
        self._field = field
        self._shown = f"the chat template of {file}" if file else "the chat template"
        self.source = with_tools or source
        """Jinja text of the template for prompts with tools; for most models, the template for all prompts."""
        self._takes_tools = "tools" in self.source
        self._template = self._compiled(source)
        self._with_tools = self._compiled(with_tools) if with_tools else self._template
        self._wants_parts = False
        """True if the template needs each message's content as a list of parts, as some models for images do."""
        self._check()

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        continue_final: bool = True,
        now: datetime | None = None,
    ) -> str:
        """Render a conversation up to the start of the assistant's answer, with the tools that the model may call.

        If the last message is the assistant's, the text ends with this message, so that the model continues it. `now`
        is the time for templates that write the date; None: the current time.

        Raises DataError if the template rejects these messages, or has no place for tools. Also if the last message is
        the assistant's, and it has no text or `continue_final` is False.
        """
        if tools and not self._takes_tools:
            raise DataError(
                self._field,
                f"there are tools (data.tools_key or tools_file), but {self._shown} has no place for tools",
            )
        if messages[-1]["role"] != "assistant":
            return self._render(messages, tools, add_generation_prompt=True, now=now)
        if not continue_final:
            raise DataError(
                "data.continue_final_message",
                "the prompt ends in a message of the assistant, which false refuses: set true, so that the model "
                "continues it, or leave the message out",
            )
        return self._continued(messages, tools, now)

    def render_closed(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), *, now: datetime | None = None
    ) -> str:
        """Render a conversation up to the end of its last message. Raises DataError if the template rejects it."""
        return self._render(messages, tools, add_generation_prompt=False, now=now)

    def _continued(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], now: datetime | None) -> str:
        """Render a conversation up to the end of the assistant's unfinished last message."""
        begun = messages[-1].get("content")
        if not begun:
            raise DataError("data", "the prompt ends in a message of the assistant without text, which can't continue")
        tagged = [*messages[:-1], {**messages[-1], "content": begun + END_TAG}]
        text = self._render(tagged, tools, add_generation_prompt=False, now=now)
        at = text.rfind(END_TAG.strip())
        if at < 0 or begun.strip() not in text:
            raise DataError(
                self._field,
                "the prompt ends in a message of the assistant, which the chat template changes, so that the model "
                "can't continue it: leave the message out, or set another model.chat_template",
            )
        # A template that strips the message has no blank behind the tag, and none belongs before it.
        return text[:at] if text[at:].startswith(END_TAG) else text[:at].rstrip()

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        now: datetime | None = None,
    ) -> str:
        variables = {
            "messages": [self._as_rendered(message) for message in messages],
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **({"strftime_now": now.strftime} if now else {}),
            **self._variables,
        }
        try:
            return (self._with_tools if tools else self._template).render(**variables)
        except Exception as error:  # a template computes, and may raise anything
            problem = f"{self._shown} can't render this prompt: {error}{_null_contents(messages)}"
            raise DataError(self._field, problem) from error

    def _compiled(self, source: str) -> jinja2.Template:
        environment = TemplateSandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        environment.globals["dict"] = DictFunction()
        environment.globals["namespace"] = TemplateNamespace
        try:
            return environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise DataError(
                self._field, f"the chat template is invalid in line {error.lineno}: {error.message}"
            ) from error
        except (SyntaxError, RecursionError) as error:  # of Python, into which Jinja translates it
            raise DataError(self._field, f"the chat template is invalid: {error}") from error

    def _check(self) -> None:
        """Raise DataError if the template ignores the messages, as when it is the path of a missing file."""
        text = ""
        for self._wants_parts in (False, True):
            try:
                text = self._render([{"role": "user", "content": PROBE}], (), add_generation_prompt=True)
            except DataError:
                self._wants_parts = False
                return  # it may refuse this conversation, and take those of the data
            if PROBE in text:
                return
        raise DataError(
            self._field,
            f"{self._shown} doesn't have the messages: it makes {text[:80]!r} of every prompt. It must loop over "
            "messages and write {{ message.content }}, or be the path of a file that does",
        )

    def _as_rendered(self, message: Message) -> Message:
        """Return a message in the form that the template expects. Null entries are left out, because many templates
        would render them as None."""
        message = {name: value for name, value in message.items() if value is not None}
        found = next((message[name] for name in REASONING if message.get(name) is not None), None)
        if found is not None:
            message = {"thinking": found, **message, "reasoning_content": found}
        if self._wants_parts and isinstance(message.get("content"), str):
            message = {**message, "content": [{"type": "text", "text": message["content"]}]}
        return message


def chat_template_text(template: str, field: str = OVERRIDE) -> str:
    """Return the Jinja text of a chat template, given as text or as the path of a file. Raises DataError, which names
    the setting."""
    if _is_text(template):
        return template
    path = Path(template).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(
            field,
            f"{template[:200]!r} has no {{{{ ... }}}}, so it is taken for a file, which can't be read: {reason}",
        ) from error


def with_template_texts(config: RunConfig, *, sent: bool = False, absolute: bool = True) -> RunConfig:
    """Return a configuration in which paths of chat templates are replaced by the templates' texts, because other
    machines can't read the files.

    Args:
        config: the configuration.
        sent: True if the configuration came from elsewhere, so that relative paths can't be resolved.
        absolute: True if absolute paths are paths on this machine. If False, paths that don't exist here are kept.

    Raises:
        DataError: a file can't be read, or a sent configuration has a relative path.
    """

    def text(template: str | None, field: str) -> str | None:
        if template is None or _is_text(template):
            return template
        is_absolute = template.startswith(("/", "~"))
        if sent and not is_absolute:
            raise DataError(
                field,
                f"{template[:200]!r} has no {{{{ ... }}}}, so it is taken for a file, but the coordinator doesn't know "
                "the folder that this relative path starts from: send the template's text, or an absolute path on the "
                "coordinator's machine",
            )
        if is_absolute and not absolute and not Path(template).is_file():
            return template
        return chat_template_text(template, field)

    model, judge = config.model, config.roles.judge
    model = model.model_copy(update={"chat_template": text(model.chat_template, OVERRIDE)})
    judge = judge.model_copy(update={"chat_template": text(judge.chat_template, JUDGE_OVERRIDE)})
    return config.model_copy(
        update={"model": model, "roles": config.roles.model_copy(update={"judge": judge})},
    )


def load_chat_template(
    folder: Path, override: str | None, arguments: Mapping[str, Any] | None = None
) -> ChatTemplate | None:
    """Load a model's chat template, or the template `override` if given. Returns None if the model has no template.
    `arguments` are variables of the template.

    Raises DataError if a file of the folder is damaged, or the template can't be read or is invalid.
    """
    special = special_tokens(folder)
    if override is not None:
        return ChatTemplate(chat_template_text(override), special, OVERRIDE, arguments)
    named = _templates_of(folder)
    source, with_tools = named.get("default"), named.get("tool_use")
    if not source:
        return None
    file = TEMPLATE_FILE if (folder / TEMPLATE_FILE).is_file() else TOKENIZER_CONFIG
    return ChatTemplate(source, special, "model.path", arguments, with_tools=with_tools, file=file)


def _templates_of(folder: Path) -> dict[str, str]:
    """Return the Jinja texts of the chat templates in a model's folder, by name. Raises DataError if a file is
    damaged."""
    file = folder / TEMPLATE_FILE
    if file.is_file():
        files = {"default": file} | {one.stem: one for one in (folder / MORE_TEMPLATES).glob("*.jinja")}
        try:
            return {name: one.read_text(encoding="utf-8") for name, one in files.items()}
        except (OSError, UnicodeDecodeError) as error:
            raise DataError("model.path", f"a chat template in {folder} can't be read: {error}") from error
    file = folder / TOKENIZER_CONFIG
    found = read_object(file).get("chat_template")
    if found is None or isinstance(found, str):
        return {"default": found} if found else {}
    try:
        named = {entry["name"]: entry["template"] for entry in found}
        if all(isinstance(one, str) for pair in named.items() for one in pair):
            return named
    except (TypeError, KeyError):
        pass
    raise DataError(
        "model.path",
        f'{file} is damaged: chat_template must be text or a list of {{"name": text, "template": text}}',
    )


def _is_text(template: str) -> bool:
    return "{{" in template or "{%" in template


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace of a chat template can't have {name!r}: a private name")


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
