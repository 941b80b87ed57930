"""The judge at roles.judge.address: a server that speaks OpenAI's chat completions."""

import json
from http import HTTPStatus
from typing import Any

import aiohttp

from relaxd.config import JudgeConfig
from relaxd.rewards.judge.asking import JudgeError
from relaxd.rpc.message_parts import numbers
from relaxd.rpc.service_settings import JUDGE_KEY
from relaxd.v1.content_pb2 import Message
from relaxd.v1.judge_pb2 import AskRequest, AskResponse
from relaxd.v1.sample_pb2 import FinishReason
from services.reward.http_answers import SHOWN, read_at_most, retry_after, shortened
from services.reward.remote.foreign_calls import MismatchError, UnreachableError

PROBE_SECONDS = 10.0
"""Deadline of a probe, and of a connection."""
MAX_REPLY_BYTES = 16 << 20
"""Maximum bytes of a reply, above any real one."""
_REFUSED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
_BUSY = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)


class ChatCompletions:
    """Sends questions to a server over HTTP. The key is only in the header of its requests."""

    def __init__(self, config: JudgeConfig, key: str | None) -> None:
        self.who, self.on = f"the judge at {config.address}", config.address
        self._config = config
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._has_key = bool(key)
        self._session: aiohttp.ClientSession | None = None

    async def probe(self) -> None:
        """Request the server's list of models, which it may answer with 404."""
        limit = aiohttp.ClientTimeout(total=PROBE_SECONDS)
        try:
            async with self._open().get(f"{self.on}/models", timeout=limit, allow_redirects=False) as answer:
                self._raise_for(answer, await read_at_most(answer, MAX_REPLY_BYTES))
        except (aiohttp.ClientError, OSError, TimeoutError) as error:  # also of a server that isn't one
            raise UnreachableError(str(error) or f"no answer within {PROBE_SECONDS:g} s") from error

    async def ask(self, question: AskRequest, seconds: float) -> AskResponse:
        limit = aiohttp.ClientTimeout(total=seconds, sock_connect=min(seconds / 2, PROBE_SECONDS))
        url = f"{self.on}/chat/completions"
        try:
            async with self._open().post(
                url, json=self._body(question), timeout=limit, allow_redirects=False
            ) as answer:
                body = await read_at_most(answer, MAX_REPLY_BYTES)
                self._raise_for(answer, body)
                if answer.status != HTTPStatus.OK:
                    raise self._failure(f"HTTP {answer.status}: {_shortened(body)}")
        except aiohttp.ServerTimeoutError as error:  # also a TimeoutError, but nobody was reached
            raise UnreachableError(str(error) or "no connection in time") from error
        except TimeoutError:
            raise self._failure(f"no reply within {seconds:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise UnreachableError(str(error) or type(error).__name__) from error
        return self._reply(body)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:  # made here, because it belongs to the loop that runs
            connector = aiohttp.TCPConnector(limit=self._config.max_in_flight + 1)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        return self._session

    def _body(self, question: AskRequest) -> dict[str, Any]:
        config = self._config
        messages = [
            {"role": message.role, "content": self._content(message, f"messages[{number}]")}
            for number, message in enumerate(question.messages)
        ]
        body: dict[str, Any] = {
            "model": config.model,
            "messages": messages,
            "max_tokens": config.max_new_tokens,
            "temperature": config.temperature,
            "seed": question.seed,
        }
        # Not every server knows these.
        if config.top_p < 1:
            body["top_p"] = config.top_p
        if config.top_k:
            body["top_k"] = config.top_k
        if config.chat_template_arguments:
            body["chat_template_kwargs"] = config.chat_template_arguments
        return body

    def _content(self, message: Message, name: str) -> str | list[dict[str, Any]]:
        """Return a message's content: its texts, or parts if it has images. Raises JudgeError."""
        kinds = [part.WhichOneof("part") for part in message.content]
        if all(kind == "text" for kind in kinds):
            return "\n".join(part.text for part in message.content)
        parts: list[dict[str, Any]] = []
        for place, (kind, part) in enumerate(zip(kinds, message.content, strict=True)):
            if kind == "text":
                parts.append({"type": "text", "text": part.text})
            elif kind == "image" and part.image.uri.startswith("data:image/"):
                parts.append({"type": "image_url", "image_url": {"url": part.image.uri}})
            else:
                scheme = part.image.uri.partition(":")[0][:8]  # what is behind it may be secret
                found = f"an image at '{scheme}:...'" if kind == "image" else kind or "empty"
                raise self._failure(
                    f"{name}.content[{place}] is {found}: a judge at an address reads text, and images as data URIs"
                )
        return parts

    def _raise_for(self, answer: aiohttp.ClientResponse, body: bytes) -> None:
        """Raise MismatchError or UnreachableError for an invalid answer to this question."""
        status = answer.status
        if status in _REFUSED:
            how = f"it refuses the key in {JUDGE_KEY}" if self._has_key else f"it wants a key: set {JUDGE_KEY}"
            raise MismatchError(f"{self.who}: HTTP {status}: {how} in the environment of the reward service")
        if status in _BUSY or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            again = retry_after(answer.headers.get("Retry-After"))
            raise UnreachableError(f"HTTP {status}: {_shortened(body)}", retry_after=again)

    def _reply(self, body: bytes) -> AskResponse:
        try:
            found = json.loads(body)
            choice = found["choices"][0]
            text = choice["message"]["content"]
            usage = found.get("usage") or {}
            # A model that only thought has said nothing.
            return AskResponse(
                text="" if text is None else text,
                finish_reason=numbers(FinishReason).get(choice.get("finish_reason") or "", 0),
                prompt_tokens=int(usage.get("prompt_tokens") or 0),
                tokens=int(usage.get("completion_tokens") or 0),
            )
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise self._failure(f"its answer is no chat completion: {_shortened(body)}") from error

    def _failure(self, what: str) -> JudgeError:
        return JudgeError(f"{self.who}: {what}")


def _shortened(body: bytes) -> str:
    return repr(shortened(body[: 4 * SHOWN].decode(errors="replace")))
