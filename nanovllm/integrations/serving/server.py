"""The server: routes, keys, errors, and the life of the process."""

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from ipaddress import ip_address
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from nanovllm import LLM, ImageRules
from nanovllm.integrations.serving.access_log import AccessLog, show_access_log
from nanovllm.integrations.serving.batches.routes import BatchRoutes
from nanovllm.integrations.serving.batches.runner import BatchRunner
from nanovllm.integrations.serving.batches.store import open_store
from nanovllm.integrations.serving.calls import Call, FailedAnswer, error_body
from nanovllm.integrations.serving.engine_loop import MAX_IMAGES, EngineDied, EngineLoop, ServerEnds
from nanovllm.integrations.serving.guard import Guard
from nanovllm.integrations.serving.metrics import CONTENT_TYPE, Metrics
from nanovllm.integrations.serving.pooled import PooledServerCall
from nanovllm.openai_format.openai_batch import CHAT, COMPLETION, Kind, Responder
from nanovllm.openai_format.pooled_calls import CALLS
from nanovllm.openai_format.request_names import Row
from nanovllm.utils.text_json import as_json, parse_json

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 2**24  # without images
SECONDS_TO_END = 1  # that the calls under way have when the server ends
_IMAGE_THREADS = 8  # that read requests' images; other requests do not wait for them
_TYPES = {500: "server_error", 503: "server_error"}


class Api:
    """The routes of OpenAI's API over one engine."""

    def __init__(self, engine: EngineLoop, responder: Responder, batches: BatchRunner | None = None, **splits: bool):
        """batches: None for no routes of batches. splits: splits_reasoning and splits_tool_calls, as Call's."""
        self._engine, self._responder, self._batches, self._splits = engine, responder, batches, splits
        self._metrics = Metrics(responder.model)
        self._image_threads = ThreadPoolExecutor(_IMAGE_THREADS, "nanovllm-images")
        # The largest image has room as a data: URL.
        self._max_body_bytes = MAX_BODY_BYTES
        if engine.images is not None:
            self._max_body_bytes += engine.image_rules.max_url_bytes

    def app(self) -> Starlette:
        routes = [
            *(
                Route(kind.url, partial(self._complete, self._maker(kind)), methods=["POST"])
                for kind in (CHAT, COMPLETION)
            ),
            *(
                Route(url, partial(self._complete, partial(PooledServerCall, kind)), methods=["POST"])
                for kind in CALLS
                for url in kind.urls
            ),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/health", self._health),
            Route("/metrics", self._show_metrics),
            *([] if self._batches is None else BatchRoutes(self._batches, _read_body).routes()),
        ]
        handlers: Any = {HTTPException: _http_error, ServerEnds: _server_error, FailedAnswer: _server_error}
        return Starlette(routes=routes, exception_handlers=handlers, lifespan=self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._engine.start()
        if self._batches is not None:
            self._batches.start()
        try:
            yield
        finally:
            if self._batches is not None:
                await asyncio.to_thread(self._batches.stop)
            await asyncio.to_thread(self._engine.stop)
            self._image_threads.shutdown(wait=False, cancel_futures=True)

    # -- for those who watch the server ------------------------------------------------------------------------------

    async def _health(self, request: Request) -> Response:
        return Response(status_code=200 if self._engine.is_serving else 503)

    async def _show_metrics(self, request: Request) -> Response:
        return Response(self._metrics.text(self._engine.stats()), headers={"Content-Type": CONTENT_TYPE})

    # -- models ------------------------------------------------------------------------------------------------------

    async def _models(self, request: Request) -> Response:
        return _Json({"object": "list", "data": [self._describe()]})

    async def _model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return _Json(self._describe())

    def _describe(self) -> dict[str, Any]:
        return {"id": self._responder.model, "object": "model", "created": 0, "owned_by": "nanovllm"}

    def _check_model(self, name: Any) -> None:
        if name is not None and name != self._responder.model:
            raise HTTPException(404, f"model {name!r} is not served: this is {self._responder.model!r}")

    # -- completions -------------------------------------------------------------------------------------------------

    def _maker(self, kind: Kind) -> Callable[[Row], Call]:
        return lambda body: Call(kind, body, self._engine.answers, **self._splits)

    async def _complete(self, make_call: Callable[[Row], Call | PooledServerCall], request: Request) -> Response:
        body = await _read_body(request, self._max_body_bytes)
        self._check_model(body.get("model"))
        try:
            call = make_call(body)
            call.record.metrics = self._metrics
            request.state.record = call.record
            if self._engine.images is not None:
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._image_threads, self._engine.read_images, call.submission)
            self._engine.submit(call.submission)
            try:
                if isinstance(call, Call) and call.streams:
                    return await self._stream(call)
                return await self._answer(call, request)
            except BaseException:
                self._end(call)
                raise
        except (ValueError, TypeError, ImportError) as error:
            raise HTTPException(400, str(error)) from error

    async def _answer(self, call: Call | PooledServerCall, request: Request) -> Response:
        """Drops the submission if the client leaves before it is done."""
        answer = asyncio.ensure_future(call.answer(self._responder))
        leaving = asyncio.ensure_future(_wait_for_disconnect(request))
        try:
            await asyncio.wait({answer, leaving}, return_when=asyncio.FIRST_COMPLETED)
            return _Json(answer.result()) if answer.done() else Response(status_code=499)  # Nobody reads it.
        finally:
            answer.cancel()
            leaving.cancel()
            self._end(call)

    async def _stream(self, call: Call) -> Response:
        num_prompt_tokens = await call.accepted()  # Until then an error has a status of its own.
        events = call.events(self._responder, num_prompt_tokens)
        end = BackgroundTask(self._end_stream, call)  # also called when the client has left
        headers = {"Cache-Control": "no-cache"}
        return StreamingResponse(events, headers=headers, media_type="text/event-stream", background=end)

    async def _end_stream(self, call: Call) -> None:
        """In the event loop: starlette gives a function that is no coroutine to a thread."""
        self._end(call)

    def _end(self, call: Call | PooledServerCall) -> None:
        self._engine.cancel(call.submission)
        call.end()


class _Json(JSONResponse):
    """Texts may hold half of a surrogate pair, which is escaped: arguments of a call, and messages about a request."""

    def render(self, content: Any) -> bytes:
        return as_json(content).encode()


async def _read_body(request: Request, max_bytes: int = MAX_BODY_BYTES) -> dict[str, Any]:
    # A page in a browser can post text to a loopback address, but not JSON.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "the body must be JSON: send 'Content-Type: application/json'")
    parts, size = [], 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > max_bytes:
            reason = "" if max_bytes == MAX_BODY_BYTES else ", which follow from max_image_mib (--max-image-mib)"
            raise HTTPException(413, f"the body has more than {max_bytes} bytes{reason}")
    try:
        body = parse_json(b"".join(parts).decode())
    except ValueError as error:
        raise HTTPException(400, f"the body {error}") from error
    if not isinstance(body, dict):
        raise HTTPException(400, f"the body must be a JSON object, not {type(body).__name__}")
    return body


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _http_error(request: Request, error: HTTPException) -> Response:
    kind = _TYPES.get(error.status_code, "invalid_request_error")
    codes = {404: "not_found"}
    body = error_body(error.detail, kind, codes.get(error.status_code))
    return _Json(body, error.status_code, headers=error.headers)


async def _server_error(request: Request, error: Exception) -> Response:
    status = 503 if type(error) is ServerEnds else 500
    return _Json(error_body(str(error), "server_error"), status)


# -- the process -------------------------------------------------------------------------------------------------------


class Server(uvicorn.Server):
    """uvicorn with an Api. At its end it ends the calls under way, which could take minutes."""

    def __init__(
        self,
        engine: EngineLoop,
        responder: Responder,
        api_key: str | None,
        allowed_hosts: list[str] | tuple[str, ...] = (),
        batches: BatchRunner | None = None,
        **splits: bool,
    ):
        """api_key, allowed_hosts: as Guard's. batches, splits: as Api's."""
        app: Any = AccessLog(Guard(Api(engine, responder, batches, **splits).app(), api_key, allowed_hosts))
        options: Any = {"log_level": "warning", "access_log": False, "lifespan": "on"}
        super().__init__(uvicorn.Config(app, timeout_graceful_shutdown=SECONDS_TO_END, **options))
        self._engine = engine
        engine.on_death = partial(setattr, self, "should_exit", True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.end_calls(ServerEnds("the server ends"))
        await super().shutdown(sockets)


def serve(
    model: str,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    served_model_name: str | None = None,
    chat_template: str | None = None,
    split_reasoning: bool = False,
    split_tool_calls: bool = False,
    access_log: bool = False,
    allowed_hosts: list[str] | tuple[str, ...] = (),
    batches: str | None = None,
    batch_file_max_mib: int = 200,
    batches_max_gib: float = 20,
    image_root: str | None = None,
    allow_remote: bool = False,
    max_image_mib: float | None = None,
    max_image_megapixels: float | None = None,
    max_images: int = MAX_IMAGES,
    **options: Any,
) -> None:
    """Serve a model until Ctrl-C, which raises KeyboardInterrupt.

    Args:
        model: a directory or a hub id.
        host, port: the address; port 0 takes a free one.
        api_key: what clients must send; None: the environment's NANOVLLM_API_KEY, or any.
        served_model_name: the name that clients use; None: model.
        chat_template: a Jinja template instead of the tokenizer's.
        split_reasoning: whether chats' answers have what the model thinks apart from their content.
        split_tool_calls: whether answers of chats with tools have the calls apart from their content.
        access_log: whether each request is a line on standard error.
        allowed_hosts: names by which clients without a key may call the server, beside addresses and localhost.
        batches: the folder of files and batches; None serves none. Batches that are under way there go on.
        batch_file_max_mib: MiB of one file that is uploaded.
        batches_max_gib: GiB of the folder, beyond which no file is uploaded and no batch begins.
        image_root: the folder below which images of requests are read; None reads no files.
        allow_remote: whether images are fetched by http and https, from public addresses alone.
        max_image_mib, max_image_megapixels: limits of an image's file and of its pixels; None: ImageRules'.
        max_images: of a request.
        options: LLM's.

    Raises:
        ValueError, TypeError, OSError, MemoryError: a wrong option, or an address that is taken.
        EngineDied: a step failed. The calls under way got status 500.
    """
    if access_log:
        show_access_log()
    limits: Any = {"max_image_mib": max_image_mib, "max_image_megapixels": max_image_megapixels}
    limits = {name: value for name, value in limits.items() if value is not None} | {"max_images": max_images}
    image_rules = ImageRules(image_root=image_root, allow_remote=allow_remote, **limits)
    api_key = api_key or os.environ.get("NANOVLLM_API_KEY")
    if api_key is None and not _is_loopback(host):
        logger.warning("host=%s: whoever reaches this machine may use the model; consider --api-key", host)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Before the model is loaded, so that an address or a folder that is taken costs no minute.
    with (
        socket.create_server((host, port), family=family, backlog=2048) as listener,
        open_store(batches, batch_file_max_mib << 20, int(batches_max_gib * 2**30)) as store,
        LLM(model, **options) as llm,
    ):
        engine = EngineLoop(llm, chat_template, image_rules)
        responder = Responder(served_model_name or model, llm.get_tokenizer)
        runner = None
        if store is not None:
            of_lines: Any = {"split_reasoning": split_reasoning, "split_tool_calls": split_tool_calls}
            of_lines["chat_template"] = chat_template
            runner = BatchRunner(store, llm, engine.background, responder.model, image_rules, **of_lines)
        splits = {"splits_reasoning": split_reasoning, "splits_tool_calls": split_tool_calls}
        server = Server(engine, responder, api_key, [host, *allowed_hosts], runner, **splits)
        shown = f"[{host}]" if family == socket.AF_INET6 else host
        print(f"Serving {responder.model} on http://{shown}:{listener.getsockname()[1]}/v1", flush=True)
        server.run(sockets=[listener])
    if engine.error is not None:
        raise EngineDied(f"the engine died: {type(engine.error).__name__}: {engine.error}") from engine.error


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"
