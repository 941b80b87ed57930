"""Clients of untrusted HTTP services: a reward service with the protocol of slime's remote_rm, and a judge with chat
completions.

The reward is at reward.address, the judge at roles.judge.address.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from relaxd.config import JudgeConfig, RewardConfig
from relaxd.rewards import RewardInput, RewardOutput
from relaxd.rewards.interface import BadRewardError, check_output
from relaxd.rewards.judge import JudgeError
from relaxd.rpc.message_parts import numbers
from relaxd.rpc.service_settings import JUDGE_KEY
from relaxd.v1.content_pb2 import Message
from relaxd.v1.judge_pb2 import AskRequest, AskResponse
from relaxd.v1.sample_pb2 import FinishReason
from services.reward.deadline import Deadline
from services.reward.patience import MismatchError, UnreachableError, authorization
from services.reward.worker_pool import Failure

MAX_SCORE_BYTES = 1 << 20
"""Maximum bytes of a reward service's answer; real answers are shorter."""
MAX_REPLY_BYTES = 16 << 20
"""Maximum bytes of a judge's reply; real replies are shorter."""
SHOWN = 200
"""Maximum characters of an answer that an error message quotes."""
_REFUSED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
_BUSY_JUDGE = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)
_BUSY_REWARD = (
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
)
"""HTTP statuses of a service that is busy, or of a proxy that can't reach the service."""


class _HttpService:
    """Connections to one HTTP service. Secrets are only in the headers of requests. Lives in one event loop."""

    probe_seconds: float
    """Deadline, in seconds, of a probe and of opening a connection."""

    def __init__(self, headers: Mapping[str, str], max_in_flight: int) -> None:
        self._headers, self._max_in_flight = headers, max_in_flight
        self._opened: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close the connections to the service."""
        if self._opened is not None:
            await self._opened.close()

    @property
    def _session(self) -> aiohttp.ClientSession:
        if self._opened is None:  # made here, because it belongs to the loop that runs
            connector = aiohttp.TCPConnector(limit=self._max_in_flight + 1)  # one for the probe
            self._opened = aiohttp.ClientSession(connector=connector, headers=self._headers)
        return self._opened

    def _unreachable(self, error: Exception) -> UnreachableError:
        late = f"no answer within {self.probe_seconds:g} s"
        return UnreachableError(str(error) or (late if isinstance(error, TimeoutError) else type(error).__name__))


class HttpReward(_HttpService):
    """Scores samples with an HTTP service. Posts each sample as {"prompt", "response", "label", "metadata"}. The JSON
    answer has the form of a reward's result."""

    calls_per_sample = True
    probe_seconds = 5.0

    def __init__(self, config: RewardConfig) -> None:
        super().__init__(authorization(config), config.max_in_flight)
        self._url, self._key = config.address, config.key
        self._who = f"the reward service at {config.address}"

    async def probe(self) -> None:
        """Check that the service answers a HEAD request with any status except those of a busy service.

        Raises UnreachableError, MismatchError.
        """
        limit = aiohttp.ClientTimeout(total=self.probe_seconds)
        try:
            async with self._session.head(self._url, timeout=limit, allow_redirects=False) as answer:
                if answer.status in _BUSY_REWARD:
                    raise UnreachableError(f"HTTP {answer.status}")
        except aiohttp.ClientResponseError as error:  # it answered, but not as HTTP wants it
            host = urlsplit(self._url).netloc
            what = f'it doesn\'t speak HTTP; if it speaks gRPC, write reward.address = "{host}"'
            raise MismatchError(f"{self._who}: {what}") from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._unreachable(error) from error

    async def score(self, samples: Sequence[RewardInput], seconds: float) -> list[RewardOutput | Failure]:
        """Score one sample. Raises UnreachableError."""
        (sample,) = samples
        # Each member has its own kind: a body that can't be sent is the caller's mistake, not an outage.
        body: dict[str, object] = {"prompt": sample.prompt, "response": sample.response, "label": sample.answer}
        if sample.environment_reward is not None:
            body |= {"environment_reward": sample.environment_reward, "environment_info": dict(sample.environment_info)}
        try:
            return [await self._post({**body, "metadata": dict(sample.metadata)}, seconds)]
        except aiohttp.ServerTimeoutError as error:  # also a TimeoutError, but nobody was reached
            raise UnreachableError(str(error) or "no connection in time") from error
        except TimeoutError:
            return [Failure(f"{self._who}: scoring an answer took longer than {seconds:g} s")]
        except (aiohttp.ClientConnectionError, OSError) as error:
            raise self._unreachable(error) from error
        except aiohttp.ClientError as error:
            return [Failure(f"{self._who}: {type(error).__name__}: {error}")]

    async def _post(self, body: object, seconds: float) -> RewardOutput | Failure:
        limit = aiohttp.ClientTimeout(total=None, sock_connect=min(seconds / 2, self.probe_seconds))
        async with Deadline(seconds), self._session.post(self._url, json=body, timeout=limit) as answer:
            text = (await _read_at_most(answer, MAX_SCORE_BYTES)).decode(errors="replace")
            if answer.status in _BUSY_REWARD:
                raise _busy(answer, _shortened(text))
            if answer.status != HTTPStatus.OK:
                return Failure(f"{self._who}: HTTP {answer.status}: {_shortened(text)}")
        try:
            return check_output(json.loads(text), self._key)
        except BadRewardError as error:
            return Failure(f"{self._who}: {error}")
        except ValueError:
            return Failure(f"{self._who} answered {_shortened(text)!r}, which is not JSON")


class ChatCompletions(_HttpService):
    """Sends questions to a judge at an address that speaks the chat completions protocol."""

    probe_seconds = 10.0

    def __init__(self, config: JudgeConfig, key: str | None) -> None:
        super().__init__({"Authorization": f"Bearer {key}"} if key else {}, config.max_in_flight)
        self.who, self.on = f"the judge at {config.address}", config.address
        self._config = config

    async def probe(self) -> None:
        """Check that the server answers a request for its list of models, even with 404.

        Raises UnreachableError, MismatchError.
        """
        limit = aiohttp.ClientTimeout(total=self.probe_seconds)
        try:
            async with self._session.get(f"{self.on}/models", timeout=limit, allow_redirects=False) as answer:
                self._raise_for(answer, await _read_at_most(answer, MAX_REPLY_BYTES))
        except (aiohttp.ClientError, OSError, TimeoutError) as error:  # also of a server that isn't one
            raise self._unreachable(error) from error

    async def ask(self, question: AskRequest, seconds: float) -> AskResponse:
        limit = aiohttp.ClientTimeout(total=seconds, sock_connect=min(seconds / 2, self.probe_seconds))
        url, body = f"{self.on}/chat/completions", self._body(question)
        try:
            async with self._session.post(url, json=body, timeout=limit, allow_redirects=False) as answer:
                reply = await _read_at_most(answer, MAX_REPLY_BYTES)
                self._raise_for(answer, reply)
                if answer.status != HTTPStatus.OK:
                    raise self._failure(f"HTTP {answer.status}: {_quoted(reply)}")
        except aiohttp.ServerTimeoutError as error:  # also a TimeoutError, but nobody was reached
            raise UnreachableError(str(error) or "no connection in time") from error
        except TimeoutError:
            raise self._failure(f"no reply within {seconds:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise self._unreachable(error) from error
        return self._reply(reply)

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
        """Return a message's content for chat completions: one text, or a list of parts if the message has images.
        Raises JudgeError."""
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
        """Raise MismatchError if the judge refuses the key, UnreachableError if it is busy or has failed."""
        status = answer.status
        if status in _REFUSED:
            how = f"it refuses the key in {JUDGE_KEY}" if self._headers else f"it wants a key: set {JUDGE_KEY}"
            raise MismatchError(f"{self.who}: HTTP {status}: {how} in the environment of the reward service")
        if status in _BUSY_JUDGE or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise _busy(answer, _quoted(body))

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
            raise self._failure(f"its answer is no chat completion: {_quoted(body)}") from error

    def _failure(self, what: str) -> JudgeError:
        return JudgeError(f"{self.who}: {what}")


async def _read_at_most(answer: aiohttp.ClientResponse, most: int) -> bytes:
    """Return the body of an HTTP answer, truncated to `most` bytes."""
    body = b""
    async for chunk in answer.content.iter_any():
        body += chunk
        if len(body) > most:
            answer.close()
            break
    return body[:most]


def _shortened(text: str) -> str:
    """Return a text in one line of at most SHOWN characters, for a message."""
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else line[: SHOWN - 1] + "…"


def _quoted(body: bytes) -> str:
    return repr(_shortened(body[: 4 * SHOWN].decode(errors="replace")))


def _busy(answer: aiohttp.ClientResponse, said: str) -> UnreachableError:
    again = retry_after(answer.headers.get("Retry-After"))
    return UnreachableError(f"HTTP {answer.status}: {said}", retry_after=again)


def retry_after(value: str | None, now: datetime | None = None) -> float:
    """Return the seconds in a Retry-After header, given as a number or as a date; 0 without a valid one."""
    try:
        return max(0.0, float(int(value or 0)))
    except ValueError:
        pass
    try:
        date = parsedate_to_datetime(value or "")
    except ValueError:
        return 0.0
    # A date without a zone is in UTC.
    return max(0.0, (date.replace(tzinfo=date.tzinfo or UTC) - (now or datetime.now(UTC))).total_seconds())
