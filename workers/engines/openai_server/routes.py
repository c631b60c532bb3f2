"""The routes: parse, check, tokenise, hand over to the engine."""

from __future__ import annotations

import asyncio
import hmac
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from workers.engines.openai_server.errors import (
    ApiError,
    bad_request,
    error_response,
    unavailable,
)
from workers.engines.openai_server.generation import GenerationResponse, OpenGenerations
from workers.engines.openai_server.metrics import EngineMetrics
from workers.engines.openai_server.port import (
    GenerationTask,
    SessionKeeper,
    SessionMover,
    Sleeper,
    TextEngine,
)
from workers.engines.openai_server.replies import ReplyShape, unix_seconds
from workers.engines.openai_server.replies import Route as RouteName
from workers.engines.openai_server.schema import (
    MAX_BODY_BYTES,
    Body,
    ChatRequest,
    CompletionRequest,
    Decoded,
    PrefetchRequest,
    check_continued,
    check_max_tokens,
    check_messages,
    check_sampling,
    decode_body,
    single_prompt,
)
from workers.engines.openai_server.session_moves import SessionMoveApi
from workers.engines.openai_server.session_sending import TRANSFERS_PATH
from workers.engines.openai_server.stream import GenerationStream

HEALTH_PATH = "/health"
_LONG_TEXT_CHARACTERS = 20_000
"""From here on tokenising takes milliseconds and moves to a thread."""
_SESSION_CHARACTERS = 200
_MOST_LISTED = 1000
_ANSWER_SECONDS = 10.0

_T = TypeVar("_T")


class Api:
    """The endpoints of one engine."""

    def __init__(self, engine: TextEngine, metrics: EngineMetrics, model_name: str, api_key: str) -> None:
        """Serve `engine` under `model_name`. Transfers to it are proven by what `api_key` gives rise to."""
        self._engine = engine
        self._metrics = metrics
        self._model_name = model_name
        self._api_key = api_key
        self._started_at = unix_seconds()
        self.open_generations = OpenGenerations()
        self.draining = False
        """True once the process was told to end: nothing new is taken."""

    def routes(self) -> list[Route]:
        """All routes; only health needs no key, and transfers have one of their own."""
        moves: list[Route] = []
        if isinstance(self._engine, SessionMover):
            moves = SessionMoveApi(self._engine, self._api_key, self.refuse_unless_ready).routes()
        if isinstance(self._engine, Sleeper) and self._engine.can_sleep:
            moves += sleep_routes(self._engine)
        return [
            *moves,
            Route(HEALTH_PATH, self.health, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/kv/prefetch", self.prefetch, methods=["POST"]),
            Route("/kv/sessions", self.sessions, methods=["GET"]),
        ]

    async def health(self, _request: Request) -> Response:
        """200 when requests are taken, else 503 and why."""
        readiness = self._engine.readiness()
        body: dict[str, object] = {"status": readiness.status}
        if readiness.status == "loading":
            body["progress"] = round(readiness.progress, 3)
        elif self.draining and readiness.status == "ready":
            body["status"] = "draining"
        status = 200 if body["status"] == "ready" else 503
        return Response(msgspec.json.encode(body), status, media_type="application/json")

    async def metrics(self, _request: Request) -> Response:
        """The Prometheus page."""
        return Response(self._metrics.page(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def models(self, _request: Request) -> Response:
        """The one model; its length limit is known once it is loaded."""
        ready = self._engine.readiness().status == "ready"
        card = {
            "id": self._model_name,
            "object": "model",
            "created": self._started_at,
            "owned_by": self._engine.owner,
            "max_model_len": self._engine.max_model_tokens if ready else None,
        }
        body = msgspec.json.encode({"object": "list", "data": [card]})
        return Response(body, media_type="application/json")

    async def chat(self, request: Request) -> GenerationResponse:
        """POST /v1/chat/completions."""
        body = await self._read(request, ChatRequest)
        messages = check_messages(body.messages)
        characters = sum(len(message.content) for message in messages)
        if characters > _LONG_TEXT_CHARACTERS:
            prompt = await asyncio.to_thread(self._engine.encode_chat, messages)
        else:
            prompt = self._engine.encode_chat(messages)
        return self._respond("chat", body, prompt, _session_of(request))

    async def completions(self, request: Request) -> GenerationResponse:
        """POST /v1/completions."""
        body = await self._read(request, CompletionRequest)
        text = single_prompt(body.prompt)
        if isinstance(text, list):
            prompt = text
        elif len(text) > _LONG_TEXT_CHARACTERS:
            prompt = await asyncio.to_thread(self._engine.encode_text, text)
        else:
            prompt = self._engine.encode_text(text)
        return self._respond("text", body, prompt, _session_of(request))

    async def prefetch(self, request: Request) -> Response:
        """POST /kv/prefetch: a session's next turn, or a prompt, is announced."""
        keeper = self._keeper()
        body = await self._decode(request, PrefetchRequest)
        if bool(body.session_id) == bool(body.tokens):
            raise bad_request("Give either session_id or tokens.", param="session_id")
        if body.tokens:
            self._check_prompt(body.tokens, "tokens")
        fetched = keeper.announce(session_id=body.session_id, tokens=body.tokens)
        answer = {"blocks": await _in_time(fetched)}
        return Response(msgspec.json.encode(answer), 202, media_type="application/json")

    async def sessions(self, request: Request) -> Response:
        """GET /kv/sessions?limit=: what each session used, the one seen last first."""
        keeper = self._keeper()
        text = request.query_params.get("limit", "100")
        if not text.isdecimal() or not 1 <= int(text) <= _MOST_LISTED:
            raise bad_request(f"limit must be from 1 to {_MOST_LISTED}.", param="limit")
        self.refuse_unless_ready()
        rows = await _in_time(keeper.sessions())
        answer = {"total": len(rows), "sessions": rows[: int(text)]}
        return Response(msgspec.json.encode(answer), media_type="application/json")

    def _keeper(self) -> SessionKeeper:
        if not isinstance(self._engine, SessionKeeper):
            raise ApiError(404, "This engine keeps no sessions.", code="not_found")
        return self._engine

    async def _decode(self, request: Request, kind: type[Decoded]) -> Decoded:
        self.refuse_unless_ready()
        return decode_body(await _read_bounded(request), kind)

    async def _read(self, request: Request, kind: type[Body]) -> Body:
        body = await self._decode(request, kind)
        if body.model != self._model_name:
            raise ApiError(
                404,
                f"The model {body.model!r} does not exist; this engine serves {self._model_name!r}.",
                param="model",
                code="model_not_found",
            )
        if _session_of(request):
            self._metrics.session_requests.inc()
        return body

    def refuse_unless_ready(self) -> None:
        """Raise `ApiError` while nothing new is taken."""
        if self.draining:
            raise unavailable("This engine is draining.", code="draining")
        status = self._engine.readiness().status
        if status != "ready":
            raise unavailable(f"This engine is not ready: {status}.", code=status)

    def _respond(
        self, route: RouteName, body: ChatRequest | CompletionRequest, prompt: Sequence[int], session: str
    ) -> GenerationResponse:
        self.refuse_unless_ready()  # again: reading and tokenising took time
        task = replace(self._task(route, body, prompt), session_id=session)
        stream = GenerationStream(
            loop=asyncio.get_running_loop(),
            metrics=self._metrics,
            prompt_tokens=len(task.prompt),
        )
        shape = ReplyShape(
            route,
            task.request_id,
            self._model_name,
            unix_seconds(),
            prompt_token_ids=task.prompt if body.return_token_ids else None,
        )
        response = GenerationResponse(self._engine, task, stream, shape, self.open_generations)
        if not body.stream:
            return response
        options = body.stream_options
        return response.streamed(include_usage=options is not None and options.include_usage)

    def _task(
        self, route: RouteName, body: ChatRequest | CompletionRequest, prompt: Sequence[int]
    ) -> GenerationTask:
        sampling = check_sampling(body)
        self._check_prompt(prompt, "messages" if route == "chat" else "prompt")
        limit = self._engine.max_model_tokens
        room = limit - len(prompt)
        wanted = check_max_tokens(body)
        if wanted is None:
            wanted = room
        if room < 1 or wanted > room:
            raise bad_request(
                f"This model's maximum context length is {limit} tokens; the request asks for "
                f"{len(prompt)} of prompt and {max(wanted, 1)} of completion.",
                param="messages" if route == "chat" else "prompt",
                code="context_length_exceeded",
            )
        prefix = "chatcmpl" if route == "chat" else "cmpl"
        return GenerationTask(
            request_id=f"{prefix}-{uuid.uuid4().hex}",
            prompt=tuple(prompt),
            max_tokens=wanted,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=sampling.seed,
            stop=sampling.stop,
            keeps_stop=body.include_stop_str_in_output,
            ignore_eos=sampling.ignore_eos,
            continued_tokens=check_continued(body, len(prompt)),
        )

    def _check_prompt(self, prompt: Sequence[int], param: str) -> None:
        if not prompt:
            raise bad_request("The prompt must have at least one token.", param=param)
        if min(prompt) < 0 or max(prompt) >= self._engine.vocabulary_size:
            raise bad_request(f"Token ids must be from 0 to {self._engine.vocabulary_size - 1}.", param=param)


def sleep_routes(engine: Sleeper) -> list[Route]:
    """Control paths of an engine that can sleep; they ask for the key as all do."""

    async def sleep(_request: Request) -> Response:
        await engine.sleep()
        return Response(b"{}", media_type="application/json")

    async def wake(_request: Request) -> Response:
        await engine.wake()
        return Response(b"{}", media_type="application/json")

    return [Route("/sleep", sleep, methods=["POST"]), Route("/wake_up", wake, methods=["POST"])]


class _RequireKey:
    """Refuses every request without the bearer token, before its body is read.

    Health is open, and a transfer proves itself by a key of its own.
    """

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or scope["path"] == HEALTH_PATH
        if is_open or scope["path"].startswith(TRANSFERS_PATH) or self._has_key(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(401, "A valid API key is required.", code="invalid_api_key")
        await error_response(error)(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)


def build_app(api: Api, api_key: str) -> Starlette:
    """Return the ASGI application of an engine. `api_key` must not be empty."""
    if not api_key:
        raise ValueError("an engine does not serve without an API key")
    return Starlette(
        routes=api.routes(),
        middleware=[Middleware(_RequireKey, api_key=api_key)],
        exception_handlers={
            ApiError: _answer_error,
            Exception: _answer_failure,
            404: _answer_not_found,
            405: _answer_wrong_verb,
        },
    )


def _session_of(request: Request) -> str:
    """The conversation that the caller names; a name that is too long is cut, and is one all the same."""
    return request.headers.get("x-session-id", "")[:_SESSION_CHARACTERS]


async def _in_time(answer: Future[_T]) -> _T:
    """Wait for the thread that computes, which answers between two steps."""
    try:
        return await asyncio.wait_for(asyncio.wrap_future(answer), _ANSWER_SECONDS)
    except TimeoutError:
        raise unavailable("The engine is busy.", code="busy") from None


async def _read_bounded(request: Request) -> bytes:
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > MAX_BODY_BYTES:
            raise ApiError(413, f"The body is over {MAX_BODY_BYTES} bytes.", code="body_too_large")
    return bytes(data)


async def _answer_error(_request: Request, error: Exception) -> Response:
    if not isinstance(error, ApiError):
        raise error
    return error_response(error)


async def _answer_failure(_request: Request, _error: Exception) -> Response:
    # Starlette raises the error again after this answer, and uvicorn logs its traceback.
    return error_response(ApiError(500, "The engine failed on this request.", code="internal"))


async def _answer_not_found(request: Request, _error: Exception) -> Response:
    return error_response(ApiError(404, f"No such route: {request.url.path}", code="not_found"))


async def _answer_wrong_verb(request: Request, _error: Exception) -> Response:
    return error_response(ApiError(405, f"{request.method} is not allowed here.", code="method"))
