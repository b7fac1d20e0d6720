"""What is fetched from the network: a server on this machine, whose address a patched resolver calls public."""

import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("PIL", reason="needs the extra images")
from test_decode import as_file, picture

from nanovllm.images import remote
from nanovllm.images.read import read_image
from nanovllm.images.remote import is_public
from nanovllm.images.rules import ImageRules

PUBLIC = "93.184.216.34"
PAGE = as_file(picture())
RULES = ImageRules(allow_remote=True, remote_seconds=5, max_image_mib=0.5)


class Pages(BaseHTTPRequestHandler):
    """The paths that tests ask for."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.server.seen.append((self.headers["Host"], self.path))
        name = self.path.strip("/").split("?")[0]
        if name.startswith("to/"):
            self.send_response(int(name.split("/")[1]))
            self.send_header("Location", self.server.targets[name])
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            getattr(self, name, self.missing)()

    def page(self):
        self.send_response(200)
        self.send_header("Content-Length", str(len(PAGE)))
        self.end_headers()
        self.wfile.write(PAGE)

    def missing(self):
        self.send_error(404)

    def long(self):
        self.send_response(200)
        self.send_header("Content-Length", str(10**30))
        self.end_headers()

    def endless(self):
        self.send_response(200)
        self.end_headers()
        self.close_connection = True
        self.keep_on(lambda: self.wfile.write(bytes(1 << 16)))

    def slow_body(self):
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.drip(b"x")

    def slow_head(self):
        self.drip(b"H")

    def slow_hints(self):
        self.drip(b"HTTP/1.1 100 Continue\r\n\r\n")

    def short(self):
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(PAGE[:20])
        self.close_connection = True

    def drip(self, data):
        self.keep_on(lambda: (self.wfile.write(data), self.wfile.flush(), time.sleep(0.02)))

    def keep_on(self, write):
        self.close_connection = True
        end = time.monotonic() + 3
        try:
            while not self.server.has_ended.is_set() and time.monotonic() < end:
                write()
        except OSError:
            pass

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    server.daemon_threads = True
    server.seen, server.targets, server.has_ended = [], {}, threading.Event()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.has_ended.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def hosts(monkeypatch, server):
    """Names -> addresses of a resolver. PUBLIC is where the server listens; any other connection is refused."""
    known = {"pages.example": [PUBLIC]}
    ask = socket.getaddrinfo

    def resolve(host, port, **options):
        if host not in known:
            return ask(host, port, **options | {"flags": socket.AI_NUMERICHOST})  # no name server
        found = known[host].pop(0) if isinstance(known[host][0], list) else known[host]
        return [each for address in found for each in ask(address, port, **options)]

    def connect(self, address):
        connected.append(address[0])
        assert address[0] == PUBLIC, "an address that was not checked"
        return real_connect(self, server.server_address)

    connected, real_connect = [], socket.socket.connect
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(remote.socket.socket, "connect", connect)
    known["connected"] = connected
    return known


def test_a_page_is_fetched(server, hosts):
    image = read_image("http://pages.example:8080/page?width=5&name=ä b", rules=RULES)
    assert (image.pixels == picture()).all()
    assert server.seen == [("pages.example:8080", "/page?width=5&name=%C3%A4%20b")]


def test_the_environments_proxy_is_not_used(server, hosts, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert read_image("http://pages.example/page", rules=RULES).width == 5


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_followed(server, hosts, status):
    hosts["other.example"] = [PUBLIC]
    server.targets = {f"to/{status}": "http://other.example/to/302/back", "to/302/back": "/page"}
    assert read_image(f"http://pages.example/to/{status}", rules=RULES).width == 5
    assert [host for host, _ in server.seen] == ["pages.example", "other.example", "other.example"]


def test_too_many_redirects_are_refused(server, hosts):
    server.targets["to/302"] = "/to/302"
    with pytest.raises(ValueError, match="is redirected more than 3 times"):
        read_image("http://pages.example/to/302", rules=RULES)
    assert len(server.seen) == 4


# Ways to say this machine, its network, or the addresses of a cloud's metadata.
INNER = {
    "127.0.0.1": "127.0.0.1",
    "localhost.example": "127.8.9.1",
    "2130706433": "127.0.0.1",
    "0x7f.1": "127.0.0.1",
    "017700000001": "127.0.0.1",
    "0": "0.0.0.0",
    "[::1]": "::1",
    "[::]": "::",
    "[::ffff:127.0.0.1]": "::ffff:127.0.0.1",
    "[::ffff:10.0.0.1]": "::ffff:10.0.0.1",
    "[64:ff9b::a9fe:a9fe]": "64:ff9b::a9fe:a9fe",
    "[2002:7f00:1::]": "2002:7f00:1::",
    "[fe80::1]": "fe80::1",
    "[fd00::1]": "fd00::1",
    "ten.example": "10.1.2.3",
    "home.example": "192.168.0.1",
    "corp.example": "172.16.0.1",
    "carrier.example": "100.64.0.1",
    "metadata.example": "169.254.169.254",
    "group.example": "224.0.0.1",
    "[ff02::1]": "ff02::1",
    "reserved.example": "240.0.0.1",
}


@pytest.mark.parametrize("host", INNER)
def test_other_addresses_than_public_ones_are_refused(host, server, hosts):
    if host.endswith(".example"):
        hosts[host] = [INNER[host]]
    with pytest.raises(ValueError, match="which is no public address"):
        read_image(f"http://{host}/page", rules=RULES)
    server.targets["to/302"] = f"http://{host}/page"
    with pytest.raises(ValueError, match="which is no public address"):
        read_image("http://pages.example/to/302", rules=RULES)
    assert hosts["connected"] == [PUBLIC]


def test_a_host_with_one_inner_address_is_refused(server, hosts):
    hosts["both.example"] = [PUBLIC, "10.0.0.1"]
    with pytest.raises(ValueError, match=r"'both.example' is at 10.0.0.1, which is no public address"):
        read_image("http://both.example/page", rules=RULES)
    assert not hosts["connected"]


def test_the_address_that_was_checked_is_the_one_that_is_used(server, hosts):
    """DNS rebinding: a name that is public when it is checked, and inner afterwards."""
    hosts["rebinding.example"] = [[PUBLIC], ["127.0.0.1"]]
    assert read_image("http://rebinding.example/page", rules=RULES).width == 5
    assert hosts["connected"] == [PUBLIC]
    assert hosts["rebinding.example"] == [["127.0.0.1"]]  # It was asked once.


def test_public_addresses_are_public():
    assert all(map(is_public, [PUBLIC, "8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]))


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("file:///etc/passwd", "leads to 'file:///etc/passwd'; only http and https are fetched"),
        ("ftp://pages.example/page", "only http and https"),
        ("data:image/png;base64,AAAA", "only http and https"),
        ("http://", "names no host"),
        ("http://[::1", "which is no URL"),
        ("http://pages.example:99999/", "which is no URL"),
        ("http://user:word@pages.example/page", "a user or a password"),
    ],
)
def test_other_urls_are_refused_after_a_redirect_too(target, said, server, hosts):
    if target != "http://":  # which leads back to the page itself
        server.targets["to/302"] = target
        with pytest.raises(ValueError, match=said):
            read_image("http://pages.example/to/302", rules=RULES)
    if target.startswith("http"):
        with pytest.raises(ValueError, match=said):
            read_image(target, rules=RULES)


@pytest.mark.parametrize("path", ["endless", "long"])
def test_bodies_that_are_too_long_are_refused(path, server, hosts):
    with pytest.raises(ValueError, match=r"MiB; max_image_mib .* allows 0.5"):
        read_image(f"http://pages.example/{path}", rules=RULES)


@pytest.mark.parametrize("path", ["slow_head", "slow_hints", "slow_body"])
def test_slow_servers_get_no_more_time_for_each_byte(path, server, hosts):
    rules = ImageRules(allow_remote=True, remote_seconds=0.2)
    with pytest.raises(ValueError, match=r"did not come within 0.2 seconds"):
        read_image(f"http://pages.example/{path}", rules=rules)


def test_a_slow_name_server_gets_no_more_time(server, hosts, monkeypatch):
    has_ended = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: [has_ended.wait(60)][:0])
    with pytest.raises(ValueError, match=r"did not come within 0.1 seconds"):
        read_image("http://pages.example/page", rules=ImageRules(allow_remote=True, remote_seconds=0.1))
    has_ended.set()


def test_other_answers_are_errors(server, hosts):
    with pytest.raises(ValueError, match="answers with status 404"):
        read_image("http://pages.example/missing", rules=RULES)
    with pytest.raises(ValueError, match=r"cannot be fetched: IncompleteRead|broken PNG"):
        read_image("http://pages.example/short", rules=RULES)
    with pytest.raises(ValueError, match=r"'nowhere.example' is not found"):
        read_image("http://nowhere.example/page", rules=RULES)


def test_https_checks_the_certificate_of_the_name(server, hosts):
    """The server speaks no TLS: no page comes of it."""
    with pytest.raises(ValueError, match=r"cannot be fetched: SSL|did not come within"):
        read_image("https://pages.example/page", rules=ImageRules(allow_remote=True, remote_seconds=1))
