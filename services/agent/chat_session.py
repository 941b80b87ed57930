"""A conversation led by a program, whose requests continue token histories or begin new ones."""

import asyncio
import hashlib
import json
import secrets
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from relaxd.data.examples import Example, Message
from relaxd.envs.token_history import CannotContinue, TokenHistory
from relaxd.models import DataError
from services.agent.chat_requests import (
    AnswerIds,
    BadRequest,
    ChatAnswer,
    ChatRequest,
    SessionMedia,
    StoredMessages,
    answer_message,
    common_messages,
    joined,
    new_messages,
    with_tool_names,
)
from services.agent.conversation import Conversation, ConversationStart
from services.agent.model_turns import MessageTokens, ModelTurns, PolicyModel, tool_names


class PromptTokens:
    """Counts the tokens of one session's requests."""

    def __init__(self, model: PolicyModel, start: ConversationStart, media: SessionMedia) -> None:
        """Create a counter without answered requests. `start` has the sample's prompt."""
        self._model = model
        self._start = start
        self._media = media
        self._answered: dict[bytes, tuple[TokenHistory, int]] = {}
        """For each answered request, by its digest: the token history, and how many of its tokens were the engine's
        prompt."""

    @property
    def most(self) -> int:
        """Maximum number of tokens of a conversation."""
        config = self._model.config
        own = self._start.example.sampling.get("max_new_tokens")
        return int(config.data.max_prompt_tokens + (own or config.rollout.max_new_tokens))

    def remember(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], history: TokenHistory, count: int
    ) -> None:
        """Record that the first `count` tokens of a history encode these messages."""
        self._answered[_digest(messages, tools)] = history, count

    async def of(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        """Return the token ids that an engine gets as prompt for messages. Unanswered messages count as a new
        conversation.

        Raises BadRequest if the chat template rejects them.
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
        """Return the token ids of a text."""
        return await asyncio.to_thread(self._model.tokenizer.encode_text, text)


def opening(example: Example, messages: Sequence[Message]) -> tuple[Example, Sequence[Message]]:
    """Split the messages of a first request into the sample's prompt and the messages after it.

    If the messages don't begin with the sample's prompt, return an empty prompt and all messages.
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


@dataclass(eq=False)
class _Branch:
    """One token history of the sample: a request and the requests that continue it."""

    turns: ModelTurns
    known: list[Message] | None
    """All messages so far, including the model's. None after a request of token ids, which may not encode messages."""
    tools: list[dict[str, Any]]


class ChatSession:
    """Answers a program's requests one after the other. Use it in one event loop."""

    def __init__(self, model: PolicyModel, start: ConversationStart, result: Conversation) -> None:
        """Start a session. The model's and the program's messages are added to `result`."""
        self.id = secrets.token_urlsafe(12)
        """Id of the session, a part of its address at the endpoint."""
        self.key = secrets.token_urlsafe(32)
        """Key that programs must send with the session's requests."""
        self.limit = ""
        """Name, from relaxd.reasons, of the run's limit by which the last request was refused; "" if it wasn't
        refused."""
        self.cut_by = ""
        """Name, from relaxd.reasons, of the limit that cut off the model's last message; "" if none did."""
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Future that gets the reason as an exception once the conversation can't continue."""
        self.media = SessionMedia(model.tokenizer.vision, start.media)
        """Media of the session's prompt and requests."""
        self.prompts = PromptTokens(model, start, self.media)
        """Counts the tokens of the session's requests."""
        self.stored = StoredMessages()
        """Stored messages, which requests can continue by an answer's id."""
        self.generating = False
        """True while the model writes a message, or waits for an engine."""
        self._model = model
        self._start = start
        self._result = result
        self._branches: list[_Branch] = []
        """Token histories with messages of the model, in the order in which they began."""
        self._one_by_one = asyncio.Lock()
        self._answers: dict[bytes, asyncio.Task[ChatAnswer]] = {}
        """Tasks that answer requests, finished or not, by the request's digest."""

    async def answer(self, request: ChatRequest) -> ChatAnswer:
        """Answer a program's request. A repeated request gets the same answer. Raises BadRequest."""
        task = self._answers.get(request.digest)
        if task is None:
            task = self._answers[request.digest] = asyncio.create_task(self._answer(request), name="answer a program")
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise self._over("its session has ended") from None
            raise

    def close(self) -> None:
        """Cancel the tasks of unfinished answers."""
        for task in self._answers.values():
            task.cancel()
        if not self.failed.cancel() and not self.failed.cancelled():
            self.failed.exception()  # retrieves it; else asyncio logs an error

    async def _answer(self, request: ChatRequest) -> ChatAnswer:
        async with self._one_by_one:
            try:
                return await self._next(request)
            except BadRequest:
                raise
            except Exception as error:  # the waiter on `failed` handles it
                if not self.failed.done():
                    self.failed.set_exception(error)
                raise self._over(str(error)) from error

    async def _next(self, request: ChatRequest) -> ChatAnswer:
        agent = self._model.config.agent
        if self._result.turns >= agent.max_turns:
            self.limit = self.limit or "turns"
            raise BadRequest(f"the model has written {agent.max_turns} messages: agent.max_turns", code="max_turns")
        branch, new = await (self._with_tokens if request.tokens else self._with_messages)(request)
        turns = branch.turns
        if turns.room < 1:
            raise self._used_up("token_ids" if request.tokens else "messages")
        self.generating = True
        try:
            message = await turns.write(
                request.most, request.stop, stop_tokens=request.stop_tokens, calls=request.calls
            )
        finally:
            self.generating = False
        if request.messages:
            self.prompts.remember(request.messages, request.tools, turns.history, message.prompt_tokens)
        self._result.messages += new
        self._result.add_reply(message, tool_names(request.tools))
        self.limit = ""  # after a refusal the program has continued, such as with a compacted history
        sent = answer_message(message.parsed, message.text)
        branch.known = None if request.tokens else [*request.messages, sent]
        if branch not in self._branches:
            self._branches.append(branch)
            self._result.histories[len(self._branches) - 1] = turns.history
        self.cut_by = "" if message.cut_by == "asked" else message.cut_by
        return ChatAnswer(
            message=sent,
            thinking=message.parsed.thinking,
            finish_reason="length" if message.cut_by else "tool_calls" if message.parsed.calls else "stop",
            prompt_tokens=message.prompt_tokens,
            completion_tokens=message.tokens,
            id=f"{self.id}-{self._result.turns}",
            ids=self._shown_ids(message.ids) if request.with_ids else None,
        )

    def _shown_ids(self, ids: MessageTokens) -> AnswerIds:
        """Return the token ids of an answer and its prompt.

        The prompt's are in a compact array, because answers are stored.
        """
        texts = [self._model.tokenizer.decode([token], special=True) for token in ids.tokens]
        return AnswerIds(array("i", ids.prompt), ids.tokens, ids.logprobs, texts)

    async def _with_messages(self, request: ChatRequest) -> tuple[_Branch, list[Message]]:
        """Append a request's messages to the history that it continues, or begin a new history.

        Returns the history and the new messages.
        """
        branch, new = self._continued(request)
        if branch is None:
            return await self._begin(request)
        if branch.turns.room > 0:
            await branch.turns.add_messages(new, self.media.of(new))
        return branch, new

    async def _with_tokens(self, request: ChatRequest) -> tuple[_Branch, list[Message]]:
        """Append a request's token ids to the history that they continue, or begin a new history.

        Returns the history and the text of the new tokens, as one message of the user.
        """
        tokens, tokenizer, example = request.tokens, self._model.tokenizer, self._start.example
        kept, branch = 0, None
        for one in self._branches:
            if (count := one.turns.history.kept_by(tokens)) > kept:
                kept, branch = count, one
        for index, token in enumerate(tokens[kept:], kept):
            if not tokenizer.has_token(token):
                raise BadRequest(f"token_ids[{index}] = {token} isn't a token of the model", f"token_ids[{index}]")
            if tokenizer.vision is not None and token in tokenizer.vision.tokens.modalities:
                raise BadRequest(
                    f"token_ids[{index}] = {token} is a token of media: send new ones in messages",
                    f"token_ids[{index}]",
                )
        if branch is None:
            self._check_room_for_another("token_ids continue none of the sample's histories")
            turns = await self._start.turns(self._model, example, [], [], len(self._branches), tokens)
            branch = _Branch(turns, None, [])
        elif branch.turns.room > len(tokens) - kept:
            branch.turns.history.add_tokens(tokens)
        else:
            raise self._used_up("token_ids")
        text = tokenizer.decode(tokens[kept:], special=True)
        is_prompt = not self._branches and text == tokenizer.render(example)
        return branch, [{"role": "user", "content": text}] if text and not is_prompt else []

    def _check_room_for_another(self, why: str) -> None:
        """Raise BadRequest if the sample already has agent.max_sequences histories."""
        most = self._model.config.agent.max_sequences
        if len(self._branches) >= most:
            raise BadRequest(
                f"{why}: this would begin another history, and the sample has agent.max_sequences = {most} already",
                code="max_sequences",
            )

    def _continued(self, request: ChatRequest) -> tuple[_Branch | None, list[Message]]:
        """Return the longest history that a request continues, or None, and the messages that the request adds.

        Raises BadRequest if the request would begin a new history, but the sample has the maximum number.
        """
        why, most, longest, new = "messages continue no history of messages", 0, None, list[Message]()
        for branch in self._branches:
            if branch.known is None:
                continue
            if branch.tools != request.tools:
                why = "tools aren't those of the requests before, and they are a part of the prompt"
                continue
            try:
                added = new_messages(branch.known, request.messages)
            except BadRequest as difference:
                why = str(difference)
            else:
                if len(branch.known) >= most:
                    most, longest, new = len(branch.known), branch, added
        if longest is None:
            self._check_room_for_another(why)
        return longest, new

    async def _begin(self, request: ChatRequest) -> tuple[_Branch, list[Message]]:
        """Begin a history with a request's messages. Return it, and the messages after those shared with a history.

        Leading messages of the sample are encoded as on the board. Control tokens in other messages are plain text.
        """
        messages = with_tool_names(request.messages)
        told = max((common_messages(branch.known or [], messages) for branch in self._branches), default=0)
        example, opened = opening(self._start.example, messages)
        turns = await self._start.turns(
            self._model, example, request.tools, opened, len(self._branches), media=self.media.of(opened)
        )
        told = max(told - (len(messages) - len(opened)), 0)
        return _Branch(turns, [], request.tools), list(opened[told:])

    def _used_up(self, param: str) -> BadRequest:
        self.limit = self.limit or "budget"
        why = "the conversation has used up its tokens: rollout.max_new_tokens"
        return BadRequest(why, param, code="context_length_exceeded")

    def _over(self, why: str) -> BadRequest:
        return BadRequest(f"the conversation can't go on: {why}", code="conversation_over")
