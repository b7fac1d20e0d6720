"""/v1/files and /v1/batches, as OpenAI's client calls them."""

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from nanovllm.integrations.serving.batches.endpoints import ENDPOINTS
from nanovllm.integrations.serving.batches.multipart import FormReader, Part
from nanovllm.integrations.serving.batches.records import Batch, Row, StoredFile, new_id
from nanovllm.integrations.serving.batches.runner import BatchRunner, CannotCancel
from nanovllm.integrations.serving.batches.store import InUse, TooLarge, Upload
from nanovllm.utils.checks import quoted
from nanovllm.utils.text_json import as_json

logger = logging.getLogger(__name__)

_WRITE_BYTES = 1 << 20  # that go to the disk together
_MAX_FIELD_BYTES = 4096
_MAX_FORM_BYTES = 1 << 16  # of a form beside its file
_MAX_NAME = 255
_MAX_PAGE = {"files": 10_000, "batches": 100}
_PAGE = {"files": 10_000, "batches": 20}  # without `limit`
_SECONDS = {"h": 3600, "d": 24 * 3600}
_MAX_WINDOW_DAYS = 366
_KEYS = ("input_file_id", "endpoint", "completion_window", "metadata")


class BatchRoutes:
    """Routes over a runner."""

    def __init__(self, runner: BatchRunner, read_body: Callable[[Request], Awaitable[Row]]):
        """read_body: reads a JSON object. Raises HTTPException."""
        self._runner, self._store, self._read_body = runner, runner.store, read_body

    def routes(self) -> list[Route]:
        return [
            _route("POST", "/v1/files", self._upload),
            _route("GET", "/v1/files", self._list_files),
            _route("GET", "/v1/files/{id}", self._show_file),
            _route("DELETE", "/v1/files/{id}", self._delete_file),
            _route("GET", "/v1/files/{id}/content", self._content),
            _route("POST", "/v1/batches", self._create),
            _route("GET", "/v1/batches", self._list_batches),
            _route("GET", "/v1/batches/{id}", self._show_batch),
            _route("POST", "/v1/batches/{id}/cancel", self._cancel),
        ]

    # -- files ---------------------------------------------------------------------------------------------------------

    async def _upload(self, request: Request) -> Response:
        try:
            reader = FormReader(request.headers.get("content-type", ""))
        except ValueError as error:
            raise HTTPException(415, str(error)) from error
        most = self._store.max_file_bytes + _MAX_FORM_BYTES
        if int(request.headers.get("content-length", 0)) > most:
            raise HTTPException(413, f"the body has more than {most} bytes (--batch-file-max-mib)")
        with self._store.upload() as upload:
            form = _Form(upload)
            try:
                async for piece in request.stream():
                    for each in reader.feed(piece):
                        form.take(each)
                    await form.write(_WRITE_BYTES)
                if not reader.has_ended:
                    raise ValueError("the form is damaged: it has no end")
                await form.write(1)
                name = form.check()
                file = await asyncio.to_thread(upload.keep, name, "batch")
            except TooLarge as error:
                raise HTTPException(413, str(error)) from error
            except ValueError as error:
                raise HTTPException(400, str(error)) from error
        return _json(file.view())

    async def _list_files(self, request: Request) -> Response:
        purpose, order = request.query_params.get("purpose"), request.query_params.get("order", "desc")
        if order not in ("asc", "desc"):
            raise HTTPException(400, f"order={quoted(order)}: must be 'asc' or 'desc'")
        files = self._store.files() if order == "asc" else self._store.files()[::-1]
        return _page(request, "files", [each for each in files if purpose in (None, each.purpose)])

    def _file(self, request: Request) -> StoredFile:
        file = self._store.file(request.path_params["id"])
        if file is None:
            raise HTTPException(404, f"there is no file {quoted(request.path_params['id'])}")
        return file

    async def _show_file(self, request: Request) -> Response:
        return _json(self._file(request).view())

    async def _content(self, request: Request) -> Response:
        """Never shown by a browser: a file may hold a page."""
        path = self._store.content(self._file(request).id)
        headers = {"X-Content-Type-Options": "nosniff", "Content-Disposition": "attachment"}
        return FileResponse(path, media_type="application/octet-stream", headers=headers)

    async def _delete_file(self, request: Request) -> Response:
        file = self._file(request)
        try:
            await asyncio.to_thread(self._store.delete_file, file.id)
        except InUse as error:  # Not 409, after which OpenAI's client tries again.
            raise HTTPException(400, str(error)) from error
        except KeyError as error:  # Somebody else has been quicker.
            raise HTTPException(404, f"there is no file {quoted(file.id)}") from error
        return _json({"id": file.id, "object": "file", "deleted": True})

    # -- batches -------------------------------------------------------------------------------------------------------

    async def _create(self, request: Request) -> Response:
        body = await self._read_body(request)
        given = {name: value for name, value in body.items() if value is not None}
        try:
            batch = self._new_batch(given)
        except (TypeError, ValueError) as error:
            raise HTTPException(400, str(error)) from error
        try:
            await asyncio.to_thread(self._runner.add, batch)
        except KeyError as error:
            raise HTTPException(400, f"input_file_id={quoted(batch.input_file_id)}: there is no such file") from error
        except ValueError as error:
            raise HTTPException(400, str(error)) from error
        return _json(batch.view())

    def _new_batch(self, given: Row) -> Batch:
        """Raises ValueError or TypeError."""
        if "output_expires_after" in given:
            raise ValueError("output_expires_after: cannot be served; files are kept until they are deleted")
        for name in given:
            if name not in _KEYS:
                raise ValueError(f"{name}: is no parameter of a batch; there are: {', '.join(_KEYS)}")
        for name in _KEYS[:3]:
            if not isinstance(given.get(name), str):
                raise TypeError(f"{name}={quoted(given.get(name))}: must be a text")
        file = self._store.file(given["input_file_id"])
        if file is None:
            raise ValueError(f"input_file_id={quoted(given['input_file_id'])}: there is no such file")
        if file.purpose != "batch":
            raise ValueError(f"input_file_id={quoted(file.id)}: its purpose is {file.purpose!r}, and must be 'batch'")
        if given["endpoint"] not in ENDPOINTS:
            raise ValueError(f"endpoint={quoted(given['endpoint'])}: must be one of {', '.join(ENDPOINTS)}")
        seconds = _read_window(given["completion_window"])
        metadata = _checked_metadata(given.get("metadata"))
        if self._store.num_bytes() > self._store.max_bytes:
            raise ValueError(f"the files have {self._store.max_bytes} bytes (--batches-max-gib): delete some")
        return Batch(
            new_id("batch_"),
            file.id,
            given["endpoint"],
            given["completion_window"],
            int(time.time()) + seconds,
            metadata,
            self._runner.model,
        )

    async def _list_batches(self, request: Request) -> Response:
        batches = await asyncio.to_thread(self._runner.batches)
        return _page(request, "batches", batches[::-1])

    async def _show_batch(self, request: Request) -> Response:
        batch = await asyncio.to_thread(self._runner.batch, request.path_params["id"])
        if batch is None:
            raise HTTPException(404, f"there is no batch {quoted(request.path_params['id'])}")
        return _json(batch.view())

    async def _cancel(self, request: Request) -> Response:
        try:
            batch = await asyncio.to_thread(self._runner.cancel, request.path_params["id"])
        except KeyError as error:
            raise HTTPException(404, f"there is no batch {quoted(request.path_params['id'])}") from error
        except CannotCancel as error:
            raise HTTPException(400, str(error)) from error
        return _json(batch.view())


def _route(method: str, path: str, answer: Callable[[Request], Awaitable[Response]]) -> Route:
    async def checked(request: Request) -> Response:
        try:
            return await answer(request)
        except ClientDisconnect:
            return Response(status_code=499)  # Nobody reads it.
        except OSError as error:
            logger.error("%s %s: %s", method, path, error)
            raise HTTPException(500, f"the disk does not take it: {error.strerror}") from error

    return Route(path, checked, methods=[method])


class _Form:
    """The form of an upload: a purpose, and a file in any order."""

    def __init__(self, upload: Upload):
        self._upload = upload
        self._fields: dict[str, bytearray] = {}
        self._name: str | None = None  # of the file
        self._waiting = bytearray()  # of the file, not on the disk yet
        self._part: Part | None = None

    def take(self, each: Part | bytes) -> None:
        """Raises ValueError."""
        if isinstance(each, Part):
            self._part = each
            is_file = each.name == "file"
            if (is_file and self._name is not None) or each.name in self._fields:
                raise ValueError(f"{quoted(each.name)}: the form has it twice")
            if is_file:
                self._name = each.filename or "file"
            elif each.name == "purpose":
                self._fields[each.name] = bytearray()
            elif each.name.startswith("expires_after"):
                raise ValueError("expires_after: cannot be served; files are kept until they are deleted")
            else:
                raise ValueError(f"{quoted(each.name)}: is no field of this form; there are: file, purpose")
        elif self._part is not None and self._part.name == "file":
            self._waiting += each
        elif self._part is not None:
            field = self._fields[self._part.name]
            field += each
            if len(field) > _MAX_FIELD_BYTES:
                raise ValueError(f"{self._part.name}: has more than {_MAX_FIELD_BYTES} bytes")

    async def write(self, least: int) -> None:
        """Write what waits, if it is that much. Raises TooLarge."""
        if len(self._waiting) >= least:
            content, self._waiting = bytes(self._waiting), bytearray()
            await asyncio.to_thread(self._upload.write, content)

    def check(self) -> str:
        """The file's name. Raises ValueError if something is missing."""
        purpose = self._fields.get("purpose")
        if purpose is None or bytes(purpose) != b"batch":
            given = "none" if purpose is None else quoted(purpose.decode("utf-8", "replace"))
            raise ValueError(f"purpose={given}: must be 'batch'")
        if self._name is None:
            raise ValueError("file: is missing")
        return self._name[:_MAX_NAME]


def _json(body: Row) -> Response:
    """Texts may hold half of a surrogate pair, which is escaped."""
    return Response(as_json(body), media_type=JSONResponse.media_type)


def _page(request: Request, kind: str, records: Sequence[StoredFile | Batch]) -> Response:
    """A page of records, which begins after the one that `after` names."""
    after, text = request.query_params.get("after"), request.query_params.get("limit", str(_PAGE[kind]))
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= _MAX_PAGE[kind]:
        raise HTTPException(400, f"limit={quoted(text)}: must be in 1..{_MAX_PAGE[kind]}")
    start = 0
    if after is not None:
        ids = [record.id for record in records]
        if after not in ids:
            raise HTTPException(400, f"after={quoted(after)}: is none of these {kind}")
        start = ids.index(after) + 1
    page = records[start : start + int(text)]
    return _json(
        {
            "object": "list",
            "data": [record.view() for record in page],
            "first_id": page[0].id if page else None,
            "last_id": page[-1].id if page else None,
            "has_more": start + len(page) < len(records),
        }
    )


def _read_window(text: str) -> int:
    """Seconds. Raises ValueError."""
    found = re.fullmatch(r"([1-9][0-9]{0,4})([hd])", text)
    seconds = int(found[1]) * _SECONDS[found[2]] if found else 0
    if not 0 < seconds <= _MAX_WINDOW_DAYS * _SECONDS["d"]:
        raise ValueError(f"completion_window={quoted(text)}: must be hours or days, such as '24h' or '7d'")
    return seconds


def _checked_metadata(metadata: Any) -> dict[str, str] | None:
    """Raises ValueError for what OpenAI does not accept."""
    if metadata is None:
        return None
    allowed = "must be an object of at most 16 texts of 512 characters, with names of 64"
    if not isinstance(metadata, dict) or len(metadata) > 16:
        raise ValueError(f"metadata={quoted(metadata)}: {allowed}")
    for name, value in metadata.items():
        if len(name) > 64 or not isinstance(value, str) or len(value) > 512:
            raise ValueError(f"metadata={quoted({name: value})}: {allowed}")
    return metadata
