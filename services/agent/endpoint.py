"""HTTP server of OpenAI's chat completions, with an address for each conversation."""

import json
import secrets
from typing import Any

from aiohttp import web

from services.agent.chat_requests import BadRequest, read_request
from services.agent.chat_session import ChatSession

MAX_BODY = 16 << 20
"""Maximum number of bytes of a request."""
MODEL = "policy"
"""Name of the model that the endpoint tells; requests may name any."""
CLOSE_SECONDS = 1.0
"""Time for open requests when the server ends."""


class Endpoint:
    """Serves chat completions on the loopback interface. Lives in one event loop."""

    def __init__(self) -> None:
        self._sessions: dict[str, ChatSession] = {}
        self._runner: web.AppRunner | None = None
        self._port = 0

    async def start(self) -> None:
        """Listen on a free port."""
        app = web.Application(client_max_size=MAX_BODY, middlewares=[_errors])
        app.router.add_post("/{session}/v1/chat/completions", self._complete)
        app.router.add_get("/{session}/v1/models", self._models)
        app.router.add_get("/{session}/v1/models/{model}", self._model)
        app.router.add_route("*", "/{rest:.*}", self._nothing)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLOSE_SECONDS)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self._port = self._runner.addresses[0][1]

    def open(self, session: ChatSession) -> str:
        """Serve a session; return its address, as OPENAI_BASE_URL has it."""
        self._sessions[session.id] = session
        return f"http://127.0.0.1:{self._port}/{session.id}/v1"

    def close_session(self, session: ChatSession) -> None:
        """Serve a session no longer."""
        self._sessions.pop(session.id, None)
        session.close()

    async def close(self) -> None:
        """End the server."""
        if self._runner is not None:
            await self._runner.cleanup()

    def _session(self, request: web.Request) -> ChatSession:
        """Return the session of a request. Raises BadRequest."""
        session = self._sessions.get(request.match_info["session"])
        if session is None:
            raise BadRequest("there is no such session, or it has ended", code="no_session", status=404)
        given = request.headers.get("Authorization", "").removeprefix("Bearer ") or request.headers.get("x-api-key", "")
        if not secrets.compare_digest(given.encode(errors="replace"), session.key.encode()):
            raise BadRequest(
                "the key isn't this session's: send OPENAI_API_KEY of the same program",
                code="invalid_api_key",
                status=401,
            )
        return session

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        asked = read_request(await request.read())
        answer = await session.answer(asked)
        model = asked.model or MODEL
        if not asked.stream:
            return web.json_response(answer.completion(model))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        events = [json.dumps(event) for event in answer.events(model, asked.include_usage)]
        await response.write("".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]).encode())
        await response.write_eof()
        return response

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        return web.json_response({"object": "list", "data": [_described(MODEL)]})

    async def _model(self, request: web.Request) -> web.Response:
        self._session(request)
        return web.json_response(_described(request.match_info["model"]))

    async def _nothing(self, request: web.Request) -> web.Response:
        raise BadRequest(
            f"{request.method} {request.path} isn't there: the endpoint has POST /v1/chat/completions and GET "
            "/v1/models",
            code="unknown_url",
            status=404,
        )


def _described(model: str) -> dict[str, Any]:
    return {"id": model, "object": "model", "created": 0, "owned_by": "relaxd"}


@web.middleware
async def _errors(request: web.Request, handler: Any) -> web.StreamResponse:
    """Answer errors in OpenAI's form."""
    try:
        response: web.StreamResponse = await handler(request)
        return response
    except BadRequest as error:
        return web.json_response(error.body, status=error.status)
    except web.HTTPRequestEntityTooLarge:
        too_large = BadRequest(f"the body has more than {MAX_BODY} bytes", status=413)
        return web.json_response(too_large.body, status=too_large.status)
