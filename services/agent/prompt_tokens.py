"""Tokens of requests that programs send without having the model generate."""

import asyncio
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from relaxd.data.examples import Example, Message
from relaxd.envs.token_history import CannotContinue, TokenHistory
from relaxd.models import DataError
from services.agent.chat_requests import BadRequest
from services.agent.conversation import ConversationStart
from services.agent.model_turns import PolicyModel
from services.agent.session_media import SessionMedia, joined


class PromptTokens:
    """Counts the tokens of one session's requests."""

    def __init__(self, model: PolicyModel, start: ConversationStart, media: SessionMedia) -> None:
        """`start` has the sample's prompt."""
        self._model = model
        self._start = start
        self._media = media
        self._answered: dict[bytes, tuple[TokenHistory, int]] = {}
        """Histories of answered requests, and how many of their tokens were the engine's prompt."""

    @property
    def most(self) -> int:
        """Maximum number of tokens of a conversation."""
        config = self._model.config
        own = self._start.example.sampling.get("max_new_tokens")
        return int(config.data.max_prompt_tokens + (own or config.rollout.max_new_tokens))

    def remember(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], history: TokenHistory, count: int
    ) -> None:
        """Remember that these messages were the first `count` tokens of a history, which may continue."""
        self._answered[_digest(messages, tools)] = history, count

    async def of(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        """Return the engine's prompt for messages; if they weren't answered, as if a conversation began with them.

        Raises BadRequest: the chat template rejects them.
        """
        if (answered := self._answered.get(_digest(messages, tools))) is not None:
            history, count = answered
            return history.context[:count]
        example, opened = opening(self._start.example, messages)
        media = [*self._start.media_of(example), *self._media.of(opened)]
        try:
            begun = await asyncio.to_thread(
                TokenHistory, self._model.tokenizer, example, tools, opened=opened, media=media
            )
        except (CannotContinue, DataError) as error:
            raise BadRequest(str(error), "messages") from error
        return begun.prompt_tokens

    async def of_text(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return await asyncio.to_thread(self._model.tokenizer.encode_text, text)


def opening(example: Example, messages: Sequence[Message]) -> tuple[Example, Sequence[Message]]:
    """Divide the messages of a first request into the prompt, as it is in the data, and what follows it.

    If they don't begin with the sample's prompt, all follow an empty one.
    """
    contents = (message.get("content") or "" for message in example.messages)
    prompt = [
        {**message, "content": joined(content) if isinstance(content, list) else content}
        for message, content in zip(example.messages, contents, strict=True)
    ]
    if prompt == messages[: len(prompt)]:
        return example, messages[len(prompt) :]
    return Example([], sampling=example.sampling, place=example.place), messages


def _digest(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> bytes:
    return hashlib.sha256(json.dumps([messages, tools], sort_keys=True).encode()).digest()
