"""Tokens of one conversation: replies exactly as the engine sampled them, and everything else from the chat template.

A reply is never encoded again. To tokenise the messages after it, the whole conversation is rendered with a mark in
place of the reply: the text after the mark ends the model's turn, contains the new messages and opens the next turn.
How this text joins the reply depends on the token at which the model stopped:

- the template writes the same token there: the sampled token stays, and the text continues after it;
- the template writes other special tokens there, as gpt-oss has <|end|> where the model wrote <|return|>: they replace
  the sampled token and have loss_mask 0;
- the template writes no special token there: the sampled token stays;
- the model was cut off: the template's text ends the model's turn.

Messages may have images, video and sound. The template writes one token per item, which is expanded to the item's
tokens.
"""

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from relaxd.data.examples import Example, Message
from relaxd.data.templating import REASONING
from relaxd.data.tokenizer import PromptTokenizer
from relaxd.envs.replies import THINKING_TAGS
from relaxd.media.placeholders import KINDS
from relaxd.media.prompt_media import StoredMedia, expand_at
from relaxd.media.sources import MediaError
from relaxd.models import DataError


class CannotContinue(ValueError):
    """The chat template doesn't show how the conversation continues. The message says why."""


@dataclass(frozen=True)
class _ControlTokens:
    """A tokenizer's special tokens, and the tags of its chat template."""

    special: Mapping[int, str]
    """Texts of special tokens, by token id. The model stops at one of these tokens."""
    texts: tuple[str, ...]
    """Texts of special tokens and of the chat template's tags; in an environment's messages they become plain text."""
    run: re.Pattern[str]
    """Pattern of consecutive special tokens with the white space around them."""
    anchor: tuple[int, str] | None
    """Id and text of a special token that doesn't strip white space around it; None if there is none."""


@lru_cache(maxsize=4)
def _control_tokens(tokenizer: PromptTokenizer) -> _ControlTokens:
    source = tokenizer.template.source if tokenizer.template else ""
    added = {token: one for token, one in tokenizer.added_tokens.items() if one.content.strip()}
    special = {token: one.content for token, one in added.items() if one.special}
    plain = [one.content for one in added.values() if one.special or one.content in source]
    neutral = [token for token in special if not (added[token].lstrip or added[token].rstrip)]
    anchor = (neutral[0], special[neutral[0]]) if neutral else None
    either = "|".join(re.escape(text) for text in sorted(special.values(), key=len, reverse=True)) or "(?!)"
    run = re.compile(rf"(?:\s*(?:{either}))*")
    return _ControlTokens(special, tuple(text for text in plain if len(text) > 1), run, anchor)


LONGEST_TAG = 32
"""Maximum length of a thinking tag and the white space after it, in tokens."""
COLUMNS = np.dtype([("tokens", np.int32), ("loss_mask", np.uint8), ("logprobs", np.float32), ("versions", np.int64)])
"""Types of a token history's columns, which `relaxd.board.schema` defines."""


def _segment(tokens: Sequence[int], mask: int, logprobs: Sequence[float] | float, versions: Any) -> np.ndarray:
    """Return the columns of one reply, or of the messages between two replies. A single log-prob or version counts for
    all tokens."""
    segment = np.empty(len(tokens), COLUMNS)
    for name, values in zip(COLUMNS.fields or (), (tokens, mask, logprobs, versions), strict=True):
        segment[name] = values
    return segment


class TokenHistory:
    """Tokens of a conversation: the prompt, then replies (loss_mask 1) and the messages between them (loss_mask 0)."""

    def __init__(
        self,
        tokenizer: PromptTokenizer,
        example: Example,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        opened: Sequence[Message] = (),
        media: Sequence[StoredMedia] = (),
        tokens: Sequence[int] = (),
    ) -> None:
        """Render and tokenise the prompt.

        Args:
            tokenizer: the model's tokenizer with its chat template.
            example: the prompt, as it is in the data.
            tools: schemas of the tools that the model may call; None: the example's tools.
            opened: messages of the environment after the prompt's. Without them and with the example's tools, the
                prompt's tokens equal those of `PromptTokenizer.encode`.
            media: media of the example's messages and of `opened`, in order.
            tokens: the prompt's token ids, instead of rendering; then only `add_tokens` continues the history.

        Raises:
            DataError: the model has no chat template, or the template rejects the prompt.
            CannotContinue: a message of the environment has content other than text and media, or the template doesn't
                write one token per item.
        """
        if tokenizer.template is None:
            raise DataError("model.chat_template", "is not set, and the model has none, which conversations need")
        self._tokenizer, self._template = tokenizer, tokenizer.template
        self._controls = _control_tokens(tokenizer)
        self._mark, self._tools_mark, self._break = (f"Zq{secrets.token_hex(8)}qZ" for _ in range(3))
        self._now = datetime.now()
        self._tools: list[Any] = list(example.tools if tools is None else tools)
        asked = replace(example, tools=self._tools)
        if opened:
            asked = replace(asked, prompt=[*example.messages, *map(self._as_plain_text, opened)])
        self.opens_thinking = False
        """True if the conversation so far ends with the opening tag of thinking."""
        self.media: list[StoredMedia] = []
        """Media items in the conversation so far, with the indices of their tokens."""
        self.prompt_tokens: list[int] = list(tokens)
        """Token ids of the engine's first prompt."""
        if tokens:
            self._note_end(tokens)
        else:
            short = self._encode(tokenizer.render(asked, self._now), None)
            self.prompt_tokens, self.media = self._expanded(short, media)
        if not self.prompt_tokens:
            raise DataError("data", f"{example.place} has no tokens")
        self._messages = asked.messages
        if self._messages[-1]["role"] == "assistant":  # the first reply is the rest of this message
            self._messages = self._messages[:-1]
        self._asked = self._messages
        """The conversation's messages before the first reply."""
        self._text_arguments = False
        """True if the chat template needs a tool call's arguments as JSON text, not as an object."""
        self._segments: list[np.ndarray] = []
        self._to_reply: list[np.ndarray] = []
        """Columns of the replies and of the messages between them, up to the end of the last reply."""
        self.media_to_last_reply: list[StoredMedia] = []
        """Media items in the conversation up to the end of the last reply."""
        self._reply_ends: list[int] = []
        self._replied = False
        self._stop: int | None = None
        """Id of the special token that ended the last reply; None if something else ended it."""

    @property
    def context(self) -> list[int]:
        """Token ids of the engine's next prompt."""
        return self.prompt_tokens + self.columns["tokens"].tolist()

    @property
    def length(self) -> int:
        """Number of the conversation's tokens after the prompt."""
        return sum(map(len, self._segments))

    @property
    def columns(self) -> np.ndarray:
        """Tokens after the prompt with COLUMNS as fields. The model wrote those with loss_mask 1; others have log-prob
        0 and the version of the token before them."""
        return _joined(self._segments)

    def to_last_reply(self) -> dict[str, np.ndarray]:
        """Return the conversation's columns tokens, loss_mask, logprobs and versions up to the end of the last
        reply."""
        joined = _joined(self._to_reply)
        return {name: np.ascontiguousarray(joined[name]) for name in COLUMNS.fields or ()}

    def reply_lengths(self) -> list[int]:
        """Return for each reply the number of tokens from the end of the previous reply, or of the prompt, to its
        end."""
        return [end - begin for begin, end in pairwise([0, *self._reply_ends])]

    def add_reply(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[int],
        message: Message,
        *,
        stopped: bool = True,
    ) -> None:
        """Append a reply as the engine returned it.

        Args:
            tokens: token ids, the end token included.
            logprobs: log-prob of each token.
            versions: version of the weights that wrote each token.
            message: the reply in the form for chat templates, such as `ParsedReply.message`.
            stopped: True if the model ended the reply, False if it was cut off.

        Raises ValueError: the lengths differ, there are no tokens, or the last message is a reply already.
        """
        if self._replied:
            raise ValueError("two replies follow each other: add the messages between them first")
        if not len(tokens) == len(logprobs) == len(versions) > 0:
            raise ValueError(
                f"a reply has {len(tokens)} tokens, {len(logprobs)} logprobs and {len(versions)} versions: they must "
                "be as many, and at least 1"
            )
        self._segments.append(_segment(tokens, 1, logprobs, versions))
        self._to_reply, self.media_to_last_reply = list(self._segments), list(self.media)
        self._reply_ends.append(self.length)
        last = int(tokens[-1])
        self._stop = last if stopped and last in self._controls.special else None
        kept = {name: value for name, value in message.items() if name not in REASONING}
        kept["content"] = kept.get("content") or ""
        if calls := kept.get("tool_calls"):  # some templates write a call's name again before the tool's answer
            functions = [{**call["function"], "name": self._broken(call["function"]["name"])} for call in calls]
            kept["tool_calls"] = [{**call, "function": one} for call, one in zip(calls, functions, strict=True)]
        self._messages = [*self._messages, kept]
        self._replied = True

    def add_messages(self, messages: Sequence[Message], media: Sequence[StoredMedia] = ()) -> int:
        """Append the messages after a reply and the beginning of the next reply; return the number of tokens.

        Texts of control tokens in the messages become plain text. An error leaves the history unchanged.

        Args:
            messages: at least one. A media item in them is a part such as {"type": "image"}.
            media: the messages' media, in order.

        Raises:
            CannotContinue: the chat template rejects the conversation, doesn't show where the reply ends or doesn't
                write one token per item, or a message has content other than text and media.
            ValueError: there is no reply before, or no message.
        """
        if not self._replied or not messages:
            raise ValueError("add_messages needs a reply before, and at least one message")
        if messages[-1]["role"] == "assistant":
            raise CannotContinue("the last message of an observation is the assistant's, whose turn is next")
        new = [self._as_plain_text(message) for message in messages]
        text, keeps_stop, anchor = self._join(self._tail(new))
        tokens, placed = self._expanded(self._encode(text, anchor), media)
        if not tokens:
            raise CannotContinue("the chat template writes nothing after the model's message")
        version = int(self._segments[-1]["versions"][-1])
        if not keeps_stop:
            self._segments[-1] = self._segments[-1][:-1]
        before = len(self.prompt_tokens) + self.length
        self.media = [*self.media, *(item.shifted(before) for item in placed)]
        self._segments.append(_segment(tokens, 0, 0.0, version))
        self._messages = [*self._messages, *new]
        self._replied = False
        return len(tokens)

    def kept_by(self, prompt: Sequence[int]) -> int:
        """Return the number of this history's tokens that begin `prompt`; 0 if it doesn't continue the history.

        The prompt may replace the special token that ended the last reply.
        """
        context = self.context
        kept = len(context)
        if self._stop is not None and len(prompt) >= kept and prompt[kept - 1] != self._stop:
            kept -= 1
        return kept if self._replied and list(prompt[:kept]) == context[:kept] else 0

    def add_tokens(self, prompt: Sequence[int]) -> None:
        """Append the tokens by which a prompt, given as token ids, continues this history after the last reply. Raises
        ValueError if it doesn't continue the history."""
        if not (kept := self.kept_by(prompt)):
            raise ValueError("add_tokens needs a prompt that continues the history, with a reply before")
        version, new = int(self._segments[-1]["versions"][-1]), prompt[kept:]
        if kept < len(self.context):
            self._segments[-1] = self._segments[-1][:-1]
        if new:
            self._segments.append(_segment(new, 0, 0.0, version))
            self._note_end(new)
        self._replied = False

    def _note_end(self, tokens: Sequence[int]) -> None:
        """Set `opens_thinking`: True if `tokens`, the conversation's last ones, end with the opening tag of
        thinking."""
        self.opens_thinking = _opens_thinking(self._tokenizer.decode(tokens[-LONGEST_TAG:], special=True))

    def _join(self, tail: str) -> tuple[str, bool, tuple[int, str] | None]:
        """Return the text to append to a reply, whether to keep the sampled stop token, and the special token before
        the text."""
        if self._stop is None:
            return tail, True, self._controls.anchor
        stop = self._controls.special[self._stop]
        run = self._controls.run.match(tail)
        assert run is not None  # it may be empty
        if (at := run[0].find(stop)) >= 0:
            return tail[at + len(stop) :], True, (self._stop, stop)
        if run[0]:
            return tail, False, self._controls.anchor
        return tail, True, (self._stop, stop)

    def _tail(self, new: Sequence[Message]) -> str:
        """Render the conversation, and return the text after the last reply. Raises CannotContinue."""
        problem = ""
        for messages, as_text in self._marked():
            try:
                text = self._rendered([*messages, *new])
                if (times := text.count(self._mark)) != 1:
                    problem = problem or f"the chat template writes the model's message {times} times"
                    continue
                tail = text.partition(self._mark)[2]
                if "tool_calls" in messages[-1]:
                    tail = self._after_calls(tail, messages[-1])
            except DataError as error:
                problem = problem or str(error)
                continue
            self._text_arguments = as_text
            return tail
        raise CannotContinue(problem)

    def _marked(self) -> Iterator[tuple[list[Message], bool]]:
        """Yield the messages with a mark at the end of the last reply, and True if calls' arguments are JSON text.

        The mark is first in the last call's arguments, if there are calls; then, for templates that omit calls or
        accept only one, in the content of the message without calls.
        """
        *before, reply = self._messages
        if calls := reply.get("tool_calls"):
            last = {**calls[-1], "function": {**calls[-1]["function"], "arguments": {"k": self._mark}}}
            marked = {**reply, "tool_calls": [*calls[:-1], last]}
        else:
            marked = {**reply, "content": self._mark}
        for as_text in (self._text_arguments, not self._text_arguments):
            yield [_with_arguments(message, as_text) for message in (*before, marked)], as_text
        without = [{name: value for name, value in one.items() if name != "tool_calls"} for one in self._messages]
        yield [*without[:-1], {**without[-1], "content": self._mark}], self._text_arguments

    def _after_calls(self, tail: str, reply: Message) -> str:
        """Return `tail`, the text after the mark, without the rest of the last tool call. The result begins with the
        end of the model's turn.

        A rendered conversation without the next messages shows where these messages begin.
        """
        closed = self._template.render_closed([*self._asked, reply], self._tools, now=self._now)
        closed = closed.partition(self._mark)[2]
        end = tail[: next((i for i, (a, b) in enumerate(zip(tail, closed, strict=False)) if a != b), len(closed))]
        stop = self._controls.special.get(-1 if self._stop is None else self._stop)
        if stop and stop in end:
            return tail[end.rindex(stop) :]
        written = set(self._segments[-1]["tokens"].tolist())
        closes = [end.rfind(text) for token, text in self._controls.special.items() if token not in written]
        at = max(closes, default=-1)
        return tail[at if at >= 0 else len(end) :]

    def _rendered(self, messages: Sequence[Message]) -> str:
        """Render the conversation with the tools, or without tools if the template would write them after the reply."""
        text = self._template.render(messages, self._marked_tools(), now=self._now)
        if self._tools_mark in text.partition(self._mark)[2]:
            return self._template.render(messages, now=self._now)
        return text

    def _marked_tools(self) -> list[Any]:
        """Return the tools' schemas with a mark in the first tool's description."""
        if not self._tools or not isinstance(self._tools[0].get("function"), Mapping):
            return self._tools
        function = self._tools[0]["function"]
        described = {**function, "description": f"{self._tools_mark} {function.get('description', '')}"}
        return [{**self._tools[0], "function": described}, *self._tools[1:]]

    def _as_plain_text(self, message: Message) -> Message:
        """Return a message of text and media with its control tokens broken up.

        Raises CannotContinue for other content.
        """
        content, text = message.get("content"), message.get("content")
        if isinstance(content, list):
            kinds = [part.get("type") for part in content]
            if other := [kind for kind in kinds if kind not in ("text", *KINDS)]:
                raise CannotContinue(
                    f"a message of {message['role']} has a part of type {other[0]!r}: only text and media do"
                )
            text = "".join(part["text"] for part in content if part["type"] == "text")
            content = content if any(kind in KINDS for kind in kinds) else text
        if not isinstance(text, str | None):
            raise CannotContinue(f"the content of a message of {message['role']} is {text!r:.80}: it must be text")
        try:
            (text or "").encode()
        except UnicodeEncodeError as error:  # JSON's "\ud83d" without its second half
            half = text[error.start] if text else ""
            raise CannotContinue(f"a message of {message['role']} has {half!r}, half of a character") from None
        return {name: self._all_broken(value) for name, value in {**message, "content": content}.items()}

    def _all_broken(self, value: Any) -> Any:
        """Return a JSON value in which break marks divide all control tokens, as in `_broken`."""
        if isinstance(value, dict):
            return {name: self._all_broken(one) for name, one in value.items()}
        if isinstance(value, list):
            return [self._all_broken(one) for one in value]
        return self._broken(value) if isinstance(value, str) else value

    def _broken(self, text: str) -> str:
        """Return a text with a break mark after the first character of each control token."""
        if found := [re.escape(one) for one in self._controls.texts if one in text]:
            return re.sub(f"(?=(?:{'|'.join(found)}))(.)", rf"\1{self._break}", text, flags=re.DOTALL)
        return text

    def _expanded(self, short: list[int], media: Sequence[StoredMedia]) -> tuple[list[int], list[StoredMedia]]:
        """Expand each media token to the tokens of its item. Returns the token ids, and the media with their positions.
        Raises CannotContinue."""
        if not media:
            return short, []
        if self._tokenizer.vision is None:
            raise CannotContinue("a message has media, but the run has none (data.media_keys, agent.media)")
        try:
            labels = [self._tokenizer.labels_of(item.times) for item in media]
            return expand_at(short, media, self._tokenizer.vision.tokens, labels)
        except MediaError as error:
            raise CannotContinue(f"a conversation {error}") from error

    def _encode(self, text: str, anchor: tuple[int, str] | None) -> list[int]:
        """Tokenise a text that follows the special token `anchor` or, without it, begins the prompt. Break marks divide
        it."""
        self.opens_thinking = _opens_thinking(text)
        tokens: list[int] = []
        for piece in filter(None, text.split(self._break)):
            if anchor is None:
                encoded = self._tokenizer.encode_text(piece)
            else:  # some tokenizers add a space at the very beginning of a text
                encoded = self._tokenizer.encode_text(anchor[1] + piece)
                encoded = encoded[1:] if encoded[0] == anchor[0] else self._tokenizer.encode_text(piece)
            tokens += encoded
            anchor = self._controls.anchor
        return tokens


def _opens_thinking(text: str) -> bool:
    return text.rstrip().endswith(tuple(begin for begin, _ in THINKING_TAGS))


def _joined(segments: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, COLUMNS), *segments])


def _with_arguments(message: Message, as_text: bool) -> Message:
    """Return a message in which the arguments of tool calls are objects, or with `as_text` JSON text."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        if as_text != isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False) if as_text else json.loads(arguments)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}
