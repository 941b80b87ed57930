"""Media items at http(s) addresses, fetched from the hosts that data.media_hosts allows.

Error messages have only the host of an address: its user, password, path and query may be secret. Some of aiohttp's
errors contain the whole address, so no message quotes them and no MediaError is raised from them.
"""

import asyncio

import aiohttp
from yarl import URL

from relaxd.media.sources import MAX_BYTES, MediaError, MediaHostAway, RemoteItem, too_large
from relaxd.waiting import Backoff, waiting

ATTEMPT_SECONDS = 60.0
"""Time limit of one attempt to fetch an item, in seconds, including redirects and the whole body."""
ATTEMPTS = 3
"""Maximum number of attempts to fetch an item. Only temporary faults cause another attempt."""
BACKOFF = Backoff(first_seconds=1.0)
MAX_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_PASSING = (408, 425, 429)
"""HTTP status codes, besides 5xx, after which another attempt may succeed."""
_HEADERS = {"Accept-Encoding": "identity"}
"""Request headers that refuse compression, because a compressed answer could be larger than its length says."""


class _PassingFault(Exception):
    """The host answered with an HTTP status after which another attempt may succeed."""


def fetch(item: RemoteItem) -> bytes:
    """Fetch a media item, and return its content of at most MAX_BYTES. Blocks; call it in a thread without an event
    loop.

    Temporary faults (no answer in time, no connection, HTTP 408, 425, 429 and 5xx) cause another attempt.

    Raises:
        MediaHostAway: ATTEMPTS attempts failed with temporary faults.
        MediaError: the item can't be fetched, or its host or that of a redirect isn't allowed.
    """
    return asyncio.run(_fetch(item))


async def _fetch(item: RemoteItem) -> bytes:
    address = _parsed(item.address)
    failed = f"is a URL of {_host(address)}, which can't be fetched"
    with waiting("a media item that is fetched", on=_host(address)):
        for attempt in range(1, ATTEMPTS + 1):
            try:
                async with asyncio.timeout(ATTEMPT_SECONDS):
                    return await _follow(address, item)
            except MediaError:
                raise
            except TimeoutError:
                fault = f"no whole answer within {ATTEMPT_SECONDS:g} s"
            except (_PassingFault, aiohttp.ClientConnectorError) as error:  # their messages have only the host
                fault = str(error)
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
                fault = f"the connection broke ({type(error).__name__})"
            except (aiohttp.ClientError, ValueError) as error:
                raise MediaError(f"{failed}: {type(error).__name__}") from None
            if attempt < ATTEMPTS:
                await asyncio.sleep(BACKOFF.spread_pause(attempt))
    raise MediaHostAway(f"{failed}, {ATTEMPTS} times in a row: {fault}")


async def _follow(address: URL, item: RemoteItem) -> bytes:
    """Return the content at an address, following redirects. Raises MediaError, _PassingFault, and aiohttp's errors."""
    first, limit = _host(address), aiohttp.ClientTimeout(total=None)  # the caller has a limit
    jar = aiohttp.DummyCookieJar()
    async with aiohttp.ClientSession(timeout=limit, cookie_jar=jar, auto_decompress=False) as session:
        for redirects in range(MAX_REDIRECTS + 1):
            if address.scheme not in ("http", "https") or not address.host:
                where = f"of {first}, which redirects to one " if redirects else ""
                raise MediaError(f"is a URL {where}that can't be fetched: it must look like https://host/path")
            if not {_host(address), f"{address.host_subcomponent}:{address.port}"} & set(item.hosts):
                what = f"is a URL of {first}" + (f", which redirects to {_host(address)}" if redirects else "")
                todo = f'add "{_host(address)}" to it, or download the item and give its path'
                raise MediaError(f"{what}: items are only fetched from hosts that data.media_hosts names, so {todo}")
            async with session.get(address, headers=_HEADERS, allow_redirects=False) as answer:
                if answer.status not in _REDIRECTS:
                    return await _body(answer)
                address = address.join(_parsed(answer.headers.get("Location", "")))
    raise MediaError(f"is a URL of {first}, which redirects more than {MAX_REDIRECTS} times")


async def _body(answer: aiohttp.ClientResponse) -> bytes:
    if answer.status in _PASSING or answer.status >= 500:
        raise _PassingFault(f"HTTP {answer.status}")
    if answer.status != 200:
        raise MediaError(f"is a URL of {_host(answer.url)}, which can't be fetched: HTTP {answer.status}")
    if (answer.content_length or 0) > MAX_BYTES:
        raise MediaError(f"is a URL of {_host(answer.url)}, whose answer {too_large()}")
    body = bytearray()
    async for chunk in answer.content.iter_any():
        body += chunk
        if len(body) > MAX_BYTES:
            raise MediaError(f"is a URL of {_host(answer.url)}, whose answer {too_large()}")
    return bytes(body)


def _parsed(address: str) -> URL:
    """Parse an address as aiohttp does, so that the checked host is the requested host."""
    try:
        return URL(address)
    except ValueError:
        raise MediaError("is a URL that can't be read: it must look like https://host/path") from None


def _host(address: URL) -> str:
    """Return the host of an address, with its port unless it is the scheme's default."""
    return address.host_port_subcomponent or "?"
