"""A server with batches in this process, on an engine that tests share."""

import json
import socket
import threading
import time
from contextlib import contextmanager

MODEL = "tiny"
SECONDS = 60  # that any wait may take


def request(i, url="/v1/completions", **body):
    """A line of a batch."""
    prompt = {"messages": [{"role": "user", "content": f"name {i}"}]} if "chat" in url else {"prompt": f"a block {i}"}
    body = {"model": MODEL, **prompt, "temperature": 0, "max_tokens": 4, "ignore_eos": True} | body
    return {"custom_id": f"line-{i}", "method": "POST", "url": url, "body": body}


def as_lines(rows) -> bytes:
    """rows: objects, or raw text."""
    return "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows).encode()


def wait_for(condition, seconds=SECONDS):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.01)
    return found


class Served:
    """A server in a thread, with OpenAI's client for it."""

    def __init__(self, llm, folder, key=None, max_file_bytes=1 << 20, max_bytes=1 << 24, allowed_hosts=(), **of_lines):
        import openai

        from nanovllm.integrations.serving.batches.runner import BatchRunner
        from nanovllm.integrations.serving.batches.store import BatchStore
        from nanovllm.integrations.serving.engine_loop import EngineLoop
        from nanovllm.integrations.serving.server import Server
        from nanovllm.openai_format.openai_batch import Responder

        self.llm = llm
        self.store = BatchStore(folder, max_file_bytes, max_bytes)
        self.store.__enter__()
        self.engine = EngineLoop(llm)
        self.runner = BatchRunner(self.store, llm, self.engine.background, MODEL, **of_lines)
        responder = Responder(MODEL, llm.get_tokenizer)
        self.server = Server(self.engine, responder, key, allowed_hosts, self.runner)
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self.client = openai.OpenAI(base_url=self.url, api_key=key or "any", max_retries=0, timeout=SECONDS)
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listener]}, daemon=True)
        self._thread.start()
        wait_for(lambda: self.server.started)

    def end(self):
        self.client.close()
        self.server.should_exit = True
        self._thread.join(SECONDS)
        self.listener.close()
        self.store.__exit__()
        assert not self._thread.is_alive()
        assert not self.runner._thread.is_alive()

    # -- what clients do -----------------------------------------------------------------------------------------------

    def upload(self, rows, name="lines.jsonl"):
        return self.client.files.create(file=(name, as_lines(rows)), purpose="batch")

    def start(self, rows, endpoint="/v1/completions", window="24h", **options):
        file = self.upload(rows)
        return self.client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window=window, **options)

    def ended(self, batch):
        return self.until(batch, "completed", "failed", "expired", "cancelled")

    def until(self, batch, *states):
        def look():
            found = self.client.batches.retrieve(batch.id)
            return found if found.status in states else None

        return wait_for(look)

    def lines(self, file_id):
        return [json.loads(line) for line in self.client.files.content(file_id).text.splitlines()]


@contextmanager
def served(llm, folder, **options):
    server = Served(llm, folder, **options)
    try:
        yield server
    finally:
        server.end()
