"""HTTP server that answers programs' requests for the model's messages. Each conversation has its own address."""

import asyncio
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from aiohttp import web

from services.agent.chat_requests import BadRequest
from services.agent.chat_session import ChatSession
from services.agent.protocols.anthropic_messages import ANTHROPIC_MESSAGES
from services.agent.protocols.chat_completions import CHAT_COMPLETIONS, read_tokenize_request
from services.agent.protocols.openai_responses import OPENAI_RESPONSES
from services.agent.protocols.protocol import MODEL, Protocol, error_body, read_object
from services.agent.protocols.token_generation import TOKEN_GENERATION

Asked = TypeVar("Asked")

PROTOCOLS: Mapping[str, Protocol] = {
    "/{session}/v1/chat/completions": CHAT_COMPLETIONS,
    "/{session}/v1/responses": OPENAI_RESPONSES,
    "/{session}/v1/messages": ANTHROPIC_MESSAGES,
    "/{session}/inference/v1/generate": TOKEN_GENERATION,
}
"""Protocols of model requests by URL path."""
MAX_BODY = 64 << 20
"""Maximum size of a request, in bytes, including all media of its messages."""
LONG_BODY = 1 << 20
"""Size in bytes above which a request is parsed in a thread, so that it doesn't delay other requests."""
CLOSE_SECONDS = 1.0
"""Maximum seconds to wait for unanswered requests when the server stops."""


class Endpoint:
    """HTTP server for all protocols, on the loopback interface or at another address. Use it in one event loop."""

    def __init__(self) -> None:
        self._sessions: dict[str, ChatSession] = {}
        self._runner: web.AppRunner | None = None
        self._address = ""

    async def start(self, host: str = "127.0.0.1") -> None:
        """Start the server on a free port at `host`, an address of this machine."""
        app = web.Application(client_max_size=MAX_BODY, middlewares=[_errors])
        for address, protocol in PROTOCOLS.items():
            app.router.add_post(address, partial(self._answer, protocol))
        app.router.add_post("/{session}/v1/messages/count_tokens", self._count_tokens)
        app.router.add_post("/{session}/tokenize", self._tokenize)
        app.router.add_get("/{session}/v1/models", self._models)
        app.router.add_get("/{session}/v1/models/{model}", self._model)
        app.router.add_route("*", "/{rest:.*}", self._nothing)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLOSE_SECONDS)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, 0)
        await site.start()
        self._address = f"{host}:{self._runner.addresses[0][1]}"

    def open(self, session: ChatSession) -> str:
        """Start to serve a session's requests. Returns the session's base URL, in the form of ANTHROPIC_BASE_URL."""
        self._sessions[session.id] = session
        return f"http://{self._address}/{session.id}"

    def close_session(self, session: ChatSession) -> None:
        """Stop serving a session's requests, and close the session."""
        self._sessions.pop(session.id, None)
        session.close()

    async def close(self) -> None:
        """Stop the HTTP server."""
        if self._runner is not None:
            await self._runner.cleanup()

    def _session(self, request: web.Request) -> ChatSession:
        """Return the session that a request's address and key belong to. Raises BadRequest."""
        session = self._sessions.get(request.match_info["session"])
        if session is None:
            raise BadRequest("there is no such session, or it has ended", code="no_session", status=404)
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        given = [key.encode(errors="replace") for key in (bearer, request.headers.get("x-api-key", ""))]
        if not any(secrets.compare_digest(key, session.key.encode()) for key in given):
            raise BadRequest(
                "the key isn't this session's: send OPENAI_API_KEY or ANTHROPIC_API_KEY of the same program",
                code="invalid_api_key",
                status=401,
            )
        return session

    async def _answer(self, protocol: Protocol, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        asked, read = await _read(session, request, lambda body: protocol.read(body, session.stored, session.media))
        answer = await session.answer(read)
        if read.kept is not None:
            session.stored.keep(answer.id, [*read.kept, answer.message], read.tools)
        if asked.get("stream") is not True:
            return web.json_response(protocol.whole(answer, asked))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        await response.write("".join(protocol.events(answer, asked)).encode())
        await response.write_eof()
        return response

    async def _count_tokens(self, request: web.Request) -> web.Response:
        """Answer with the number of a request's tokens, in the form of Anthropic's count_tokens."""
        session = self._session(request)
        _, asked = await _read(
            session, request, lambda body: ANTHROPIC_MESSAGES.read(body, session.stored, session.media)
        )
        return web.json_response({"input_tokens": len(await session.prompts.of(asked.messages, asked.tools))})

    async def _tokenize(self, request: web.Request) -> web.Response:
        """Answer with the token ids of messages or a text, in the form of vLLM's /tokenize."""
        session = self._session(request)
        _, asked = await _read(session, request, lambda body: read_tokenize_request(body, session.media))
        if isinstance(asked, str):
            tokens = await session.prompts.of_text(asked)
        else:
            tokens = await session.prompts.of(asked.messages, asked.tools)
        return web.json_response({"tokens": tokens, "count": len(tokens), "max_model_len": session.prompts.most})

    async def _models(self, request: web.Request) -> web.Response:
        session = self._session(request)
        return web.json_response({"object": "list", "data": [_described(MODEL, session)]})

    async def _model(self, request: web.Request) -> web.Response:
        return web.json_response(_described(request.match_info["model"], self._session(request)))

    async def _nothing(self, request: web.Request) -> web.Response:
        raise BadRequest(
            f"{request.method} {request.path} isn't there: the endpoint has POST {_paths()}, "
            "/v1/messages/count_tokens and /tokenize, and GET /v1/models",
            code="unknown_url",
            status=404,
        )


async def _read(
    session: ChatSession, request: web.Request, read: Callable[[dict[str, Any]], Asked]
) -> tuple[dict[str, Any], Asked]:
    """Return a request's body and its parsed form.

    Long bodies, and those that may have media, are parsed in a thread.
    """
    body = await request.read()

    def parse() -> tuple[dict[str, Any], Asked]:
        asked = read_object(body)
        return asked, read(asked)

    takes_long = session.media.vision is not None or len(body) > LONG_BODY
    return await asyncio.to_thread(parse) if takes_long else parse()


def _described(model: str, session: ChatSession) -> dict[str, Any]:
    return {
        "id": model,
        "object": "model",
        "created": 0,
        "owned_by": "relaxd",
        "max_model_len": session.prompts.most,
    }


def _paths() -> str:
    return ", ".join(address.removeprefix("/{session}") for address in PROTOCOLS)


@web.middleware
async def _errors(request: web.Request, handler: Any) -> web.StreamResponse:
    """Turn errors into error answers in the form of the request's protocol."""
    try:
        response: web.StreamResponse = await handler(request)
        return response
    except BadRequest as error:
        return _refusal(request, error)
    except web.HTTPRequestEntityTooLarge:
        return _refusal(request, BadRequest(f"the body has more than {MAX_BODY} bytes", status=413))


def _refusal(request: web.Request, error: BadRequest) -> web.Response:
    address = resource.canonical if (resource := request.match_info.route.resource) else ""
    forms = (protocol.error for begin, protocol in PROTOCOLS.items() if address.startswith(begin))
    return web.json_response(next(forms, error_body)(error), status=error.status)
