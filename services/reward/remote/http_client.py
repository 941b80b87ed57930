"""Calls of a service over HTTP, in the form of slime's remote_rm."""

import json
from collections.abc import Sequence
from http import HTTPStatus
from urllib.parse import urlsplit

import aiohttp

from relaxd.config import RewardConfig
from relaxd.rewards import RewardInput, RewardOutput
from relaxd.rewards.interface import BadRewardError, check_output
from services.reward.deadline import Deadline
from services.reward.http_answers import read_at_most, retry_after, shortened
from services.reward.remote.foreign_calls import MismatchError, UnreachableError, authorization
from services.reward.worker_pool import Failure

PROBE_SECONDS = 5.0
"""Deadline of a probe, and of each connection."""
MAX_ANSWER_BYTES = 1 << 20
"""Maximum bytes of an answer, above any real reward's."""
_AGAIN = (
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
)
"""Status codes of a busy service, and of a proxy whose service is away."""


class HttpClient:
    """Posts each sample as {"prompt", "response", "label", "metadata"}. The JSON answer has the form of a reward's
    result."""

    calls_per_sample = True

    def __init__(self, config: RewardConfig) -> None:
        self._url = config.address
        self._headers = authorization(config)
        self._key = config.key
        self._max_in_flight = config.max_in_flight
        self._session: aiohttp.ClientSession | None = None

    async def probe(self) -> None:
        """Check that the service answers a HEAD request, in any way.

        Raises UnreachableError, MismatchError.
        """
        limit = aiohttp.ClientTimeout(total=PROBE_SECONDS)
        try:
            async with self._connected().head(self._url, timeout=limit, allow_redirects=False) as answer:
                if answer.status in _AGAIN:
                    raise UnreachableError(f"HTTP {answer.status}")
        except aiohttp.ClientResponseError as error:  # it answered, but not as HTTP wants it
            host = urlsplit(self._url).netloc
            what = f'it doesn\'t speak HTTP; if it speaks gRPC, write reward.address = "{host}"'
            raise MismatchError(f"the reward service at {self._url}: {what}") from error
        except TimeoutError as error:
            raise UnreachableError(str(error) or f"no answer within {PROBE_SECONDS:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise UnreachableError(str(error) or type(error).__name__) from error

    async def score(self, samples: Sequence[RewardInput], seconds: float) -> list[RewardOutput | Failure]:
        """Score one sample. Raises UnreachableError."""
        (sample,) = samples
        # Each member has its own kind: a body that can't be sent is the caller's mistake, not an outage.
        body: dict[str, object] = {"prompt": sample.prompt, "response": sample.response, "label": sample.answer}
        if sample.environment_reward is not None:
            body |= {"environment_reward": sample.environment_reward, "environment_info": dict(sample.environment_info)}
        try:
            outcome = await self._post({**body, "metadata": dict(sample.metadata)}, seconds)
        except aiohttp.ServerTimeoutError as error:  # also a TimeoutError, but nobody was reached
            raise UnreachableError(str(error) or "no connection in time") from error
        except TimeoutError:
            outcome = Failure(f"the reward service at {self._url}: scoring an answer took longer than {seconds:g} s")
        except (aiohttp.ClientConnectionError, OSError) as error:
            raise UnreachableError(str(error) or type(error).__name__) from error
        except aiohttp.ClientError as error:
            outcome = Failure(f"the reward service at {self._url}: {type(error).__name__}: {error}")
        return [outcome]

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:  # made here, because it belongs to the loop that runs
            connector = aiohttp.TCPConnector(limit=self._max_in_flight + 1)  # one for the probe
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        return self._session

    async def _post(self, body: object, seconds: float) -> RewardOutput | Failure:
        limit = aiohttp.ClientTimeout(total=None, sock_connect=min(seconds / 2, PROBE_SECONDS))
        async with Deadline(seconds), self._connected().post(self._url, json=body, timeout=limit) as answer:
            text = (await read_at_most(answer, MAX_ANSWER_BYTES)).decode(errors="replace")
            if answer.status in _AGAIN:
                again = retry_after(answer.headers.get("Retry-After"))
                raise UnreachableError(f"HTTP {answer.status}: {shortened(text)}", retry_after=again)
            if answer.status != HTTPStatus.OK:
                return Failure(f"the reward service at {self._url}: HTTP {answer.status}: {shortened(text)}")
        try:
            return check_output(json.loads(text), self._key)
        except BadRewardError as error:
            return Failure(f"the reward service at {self._url}: {error}")
        except ValueError:
            return Failure(f"the reward service at {self._url} answered {shortened(text)!r}, which is not JSON")
