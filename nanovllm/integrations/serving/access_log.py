"""A line in the log for each request: who asked for what, and what came of it."""

import json
import logging
import time
from typing import Any

from nanovllm.integrations.serving.metrics import CallRecord

logger = logging.getLogger("nanovllm.access")


class AccessLog:
    """An ASGI application around another, which may leave a CallRecord in the request's state."""

    def __init__(self, app: Any):
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.monotonic(), 500  # of a request that raises

        async def noting_status(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        state = scope.setdefault("state", {})
        try:
            await self._app(scope, receive, noting_status)
        finally:
            if logger.isEnabledFor(logging.INFO):
                logger.info("%s", _line(scope, status, time.monotonic() - start, state.get("record")))


def _line(scope: Any, status: int, seconds: float, record: CallRecord | None) -> str:
    host = (scope.get("client") or ("-",))[0]
    # In quotes, and with escapes: a path may hold the end of a line.
    request = json.dumps(f"{scope['method']} {scope['path']}")
    parts = [time.strftime("%Y-%m-%dT%H:%M:%S%z"), host, request, str(status), f"{seconds:.3f}s"]
    if record is not None and record.num_prompt_tokens is not None:
        parts += [f"prompt_tokens={record.num_prompt_tokens}", f"completion_tokens={record.num_tokens}"]
        if record.seconds_to_first_token is not None:
            parts.append(f"first_token={record.seconds_to_first_token:.3f}s")
        parts.append(f"finish={','.join(record.finish_reasons) or '-'}")
    return " ".join(parts)


def show_access_log() -> None:
    """Let the lines be seen, on standard error if nobody has set up logging."""
    logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        logging.basicConfig(format="%(message)s")
