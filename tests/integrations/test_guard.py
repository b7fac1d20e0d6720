"""Who may use a server: with a key, and without one."""

import asyncio
import json

import pytest

pytest.importorskip("starlette", reason="needs the extra serve")
Guard = pytest.importorskip("nanovllm.integrations.serving.guard").Guard


def ask(headers, key=None, allowed=()):
    """The status, and the message of an error."""
    sent = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def send(message):
        sent.append(message)

    encoded = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers]
    scope = {"type": "http", "method": "POST", "path": "/v1/files", "headers": encoded}
    asyncio.run(Guard(app, key, allowed)(scope, None, send))
    body = json.loads(sent[1]["body"])
    return sent[0]["status"], body.get("error", {}).get("message", "")


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000", "192.168.1.5", "gpu.lan:8000", "GPU.lan.", "box"],
)
def test_hosts_of_this_server(host):
    assert ask([("Host", host)], allowed=["gpu.lan", "box"]) == (200, "")


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "xgpu.lan", ""),
        *("a/b", "localhost:x", "me@localhost", "localhost/", "localhost#a"),
    ],
)
def test_hosts_of_others(host):
    """As after a DNS rebinding: the name of a page's owner has become an address of this machine."""
    status, message = ask([("Host", host)], allowed=["gpu.lan"])
    assert status == 403
    assert "--allowed-hosts NAME" in message
    assert ask([("Host", host), ("Authorization", "Bearer k")], key="k")[0] == 200, "a page has no key"


@pytest.mark.parametrize(
    ("origin", "host", "status"),
    [
        ("http://localhost:3000", "localhost:8000", 200),
        ("http://127.0.0.1", "localhost:8000", 200),
        ("http://192.168.1.5:8000", "192.168.1.5:8000", 200),
        ("https://gpu.lan", "localhost:8000", 200),
        ("https://evil.example", "localhost:8000", 403),
        ("http://192.168.1.5", "192.168.1.5:8000", 403),
        ("http://6.6.6.6", "localhost:8000", 403),
        ("null", "localhost:8000", 403),
        ("", "localhost:8000", 403),
        ("http://localhost.evil.example", "localhost:8000", 403),
    ],
)
def test_origins(origin, host, status):
    """A browser's form posts multipart/form-data to any address, and says whose page it is."""
    assert ask([("Host", host), ("Origin", origin)], allowed=["gpu.lan"])[0] == status


def test_two_headers_of_one_name():
    assert ask([("Host", "localhost"), ("Host", "evil.example")])[0] == 403
    assert ask([("Host", "localhost"), ("Origin", "http://localhost"), ("Origin", "https://evil.example")])[0] == 403


@pytest.mark.parametrize(
    ("value", "status"),
    [("Bearer secret", 200), ("bearer  secret", 200), ("Bearer wrong", 401), ("Basic secret", 401), ("", 401)],
)
def test_a_key(value, status):
    assert ask([("Host", "evil.example"), ("Authorization", value)], key="secret")[0] == status


@pytest.mark.parametrize("name", ["http://gpu.lan", "gpu.lan:8000", "*", "*.lan", "", "a b"])
def test_names_that_no_host_has(name):
    with pytest.raises(ValueError, match="allowed_hosts="):
        Guard(None, None, [name])
