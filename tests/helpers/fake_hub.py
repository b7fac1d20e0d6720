"""A hub on this machine, for huggingface_hub itself: what it asks of the real one, over HTTP."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import huggingface_hub

SHA = "1" * 40


class FakeHub:
    """Attributes:
    address, cache: of the server, and the folder of what was downloaded.
    models: hub id -> name of a file -> its bytes.
    status: what every request is answered with instead, if it is not 200.
    error: the hub's own word for it, as its header has it.
    lost: names of files that cannot be downloaded.
    asked: the name of each file that was downloaded.
    """

    def __init__(self, address: str, cache: str):
        self.address, self.cache, self.models = address, cache, {}
        self.status, self.error, self.lost, self.asked = 200, "", set(), []

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        parts = urlsplit(request.path).path.strip("/").split("/")
        if self.status != 200:
            return self._send(request, b"{}", self.status, {"X-Error-Code": self.error} if self.error else {})
        is_api = parts[:2] == ["api", "models"]
        parts = parts[2:] if is_api else parts
        files = self.models.get("/".join(parts[:2]))
        if files is None:
            return self._send(request, b"{}", 404, {"X-Error-Code": "RepoNotFound"})
        if is_api:
            return self._send(request, json.dumps(self._facts(parts, files)).encode())
        name = "/".join(parts[4:])
        if name in self.lost:
            return self._send(request, b"", 404, {"X-Error-Code": "EntryNotFound"})
        content = files[name]
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": SHA}
        if request.command == "GET":
            self.asked.append(name)
        self._send(request, content, 200, headers)

    def _facts(self, parts: list[str], files: dict[str, bytes]) -> object:
        if parts[2:3] == ["tree"]:
            return [{"type": "file", "path": name, "size": len(files[name]), "oid": "0" * 40} for name in files]
        siblings = [{"rfilename": name, "size": len(files[name]), "blobId": "0" * 40} for name in files]
        return {"id": "/".join(parts[:2]), "sha": SHA, "siblings": siblings, "private": False, "tags": []}

    def _send(self, request, body: bytes, status: int = 200, headers=()) -> None:
        request.send_response(status)
        for name, value in dict(headers).items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body)


def new_sessions() -> None:
    """Before 1.0 a thread's connection keeps whether it is offline."""
    getattr(huggingface_hub.utils, "reset_sessions", lambda: None)()


@contextmanager
def fake_hub(monkeypatch, cache) -> Iterator[FakeHub]:
    """Within the block huggingface_hub asks this hub, and keeps files in the folder `cache`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            hub.answer(self)

        do_HEAD = do_GET

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = FakeHub(f"http://127.0.0.1:{server.server_port}", str(cache))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    constants = "huggingface_hub.constants"
    monkeypatch.setattr(f"{constants}.ENDPOINT", hub.address)
    template = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
    for module in (constants, "huggingface_hub.file_download"):  # Before 1.0 the second has a copy.
        monkeypatch.setattr(f"{module}.HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
    monkeypatch.setattr(f"{constants}.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(f"{constants}.HF_HUB_OFFLINE", False)
    try:
        yield hub
    finally:
        new_sessions()
        server.shutdown()
        thread.join()
        server.server_close()
