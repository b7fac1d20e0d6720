"""Images from the network: http and https, public addresses alone, and at most so many bytes, redirects and seconds.

A name is resolved once, what it resolves to is checked, and the connection goes to that address. So a name that changes
its address between check and use (DNS rebinding) gains nothing. Proxies of the environment are not used: they would
resolve the name again.
"""

import http.client
import io
import socket
import ssl
import threading
import time
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Any
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from nanovllm.images.rules import ImageRules
from nanovllm.utils.checks import one_line, quoted

_REDIRECTS = (301, 302, 303, 307, 308)
_PORTS = {"http": 80, "https": 443}
_AT_ONCE = 1 << 16  # bytes
_NAT64 = IPv6Network("64:ff9b::/96")  # An IPv4 address as hosts without IPv4 reach it.
_UNICAST = IPv6Network("2000::/3")  # All that has been given to anybody.
_SAFE = "/:?&=%;,@!$'()*+~#[]"  # of a path, beside letters and digits

Address = tuple[int, Any]  # a family, and what `socket.connect` takes


class _Refused(ValueError):
    """A URL that may not be fetched, or an answer that is of no use."""


def fetch(url: str, rules: ImageRules) -> bytes:
    """The bytes that a URL leads to. Raises ValueError if it may not be fetched, or cannot be."""
    if not rules.allow_remote:
        raise ValueError(f"is not fetched: allow_remote ({rules.remedy('allow_remote', 'True')}) is off")
    clock = _Clock(rules.remote_seconds)
    try:
        for _ in range(rules.max_redirects + 1):
            answer = _get(url, rules, clock)
            if isinstance(answer, bytes):
                return answer
            url = answer
    except (TimeoutError, _Late) as error:
        raise ValueError(f"did not come within {rules.remote_seconds:g} seconds") from error
    except (OSError, http.client.HTTPException) as error:
        raise ValueError(f"cannot be fetched: {one_line(error)}") from error
    raise ValueError(f"is redirected more than {rules.max_redirects} times")


class _Late(Exception):
    """The time is over."""


class _Clock:
    """The time that is left."""

    def __init__(self, seconds: float):
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Raises _Late if none is."""
        if (left := self._end - time.monotonic()) <= 0:
            raise _Late
        return left


def _get(url: str, rules: ImageRules, clock: _Clock) -> bytes | str:
    """The body, or the URL to which a redirect leads."""
    parts = _split(url)
    host = str(parts.hostname)
    addresses = _resolve(host, parts.port or _PORTS[parts.scheme], clock)
    connection = _Connection(host, parts.port, parts.scheme == "https", addresses, clock)
    try:
        target = quote(parts.path or "/", _SAFE) + (f"?{quote(parts.query, _SAFE)}" if parts.query else "")
        connection.request("GET", target, headers={"Accept-Encoding": "identity", "User-Agent": "nanovllm"})
        answer = connection.getresponse()
        if answer.status in _REDIRECTS and (location := answer.getheader("Location")):
            return _joined(url, location)
        if answer.status != 200:
            raise _Refused(f"the server answers with status {answer.status}")
        if (length := answer.getheader("Content-Length", "")).isdecimal():
            rules.check_bytes(int(length[:20]))
        body = io.BytesIO()
        while block := answer.read(_AT_ONCE):
            body.write(block)
            rules.check_bytes(body.tell())
        return body.getvalue()
    finally:
        connection.close()


def _split(url: str) -> SplitResult:
    """Raises _Refused for what is no plain URL of http or https."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise _Refused(f"leads to {quoted(url)}, which is no URL: {error}") from error
    if parts.scheme not in _PORTS:
        raise _Refused(f"leads to {quoted(url)}; only http and https are fetched")
    if not parts.hostname or port == 0:
        raise _Refused(f"leads to {quoted(url)}, which names no host")
    if parts.username is not None or parts.password is not None:
        raise _Refused("has a user or a password, which is not sent")
    return parts


def _joined(url: str, location: str) -> str:
    try:
        return urljoin(url, location)
    except ValueError as error:
        raise _Refused(f"leads to {quoted(location)}, which is no URL: {error}") from error


# -- addresses ---------------------------------------------------------------------------------------------------------


def _resolve(host: str, port: int, clock: _Clock) -> list[Address]:
    """Where a host is reached. Raises _Refused if one of its addresses is not public, _Late, and OSError."""
    found: list[Any] = []

    def ask() -> None:
        try:
            found.extend(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP))
        except (OSError, UnicodeError) as error:
            found.append(error)

    # A thread, because nothing else ends this call before the resolver gives up.
    thread = threading.Thread(target=ask, name="nanovllm-images-resolve", daemon=True)
    thread.start()
    thread.join(clock.left())
    if thread.is_alive():
        raise _Late
    addresses = []
    for each in found:
        if isinstance(each, Exception):
            raise _Refused(f"the host {host!r} is not found: {one_line(each)}") from each
        family, _, _, _, address = each
        if not is_public(address[0]):
            raise _Refused(f"the host {host!r} is at {address[0]}, which is no public address")
        addresses.append((family, address))
    if not addresses:
        raise _Refused(f"the host {host!r} is not found")
    return addresses


def is_public(text: str) -> bool:
    """Whether an address is one of the internet: not private, loopback, link-local, multicast, reserved or
    unspecified, also where it is an IPv4 address in the form of IPv6."""
    address = ip_address(text)
    if isinstance(address, IPv6Address):
        for inner in _inner_addresses(address):
            if not _is_public_ipv4(inner):
                return False
        if address.ipv4_mapped is not None or address in _NAT64:
            return True
        return address in _UNICAST and address.is_global and not address.is_multicast
    return _is_public_ipv4(address)


def _inner_addresses(address: IPv6Address) -> list[IPv4Address]:
    """IPv4 addresses to which this one leads in the end."""
    inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if address in _NAT64:
        inner.append(IPv4Address(int(address) & 0xFFFFFFFF))
    return [each for each in inner if each is not None]


def _is_public_ipv4(address: IPv4Address) -> bool:
    return address.is_global and not address.is_multicast and not address.is_reserved


# -- connections -------------------------------------------------------------------------------------------------------


class _Connection(http.client.HTTPConnection):
    """A connection to one of the addresses that have been checked, with one clock for all that it does."""

    def __init__(self, host: str, port: int | None, is_secure: bool, addresses: list[Address], clock: _Clock):
        super().__init__(host, port or _PORTS["https" if is_secure else "http"])
        self.default_port = _PORTS["https" if is_secure else "http"]  # It is not named in the header.
        self._is_secure, self._addresses, self._clock = is_secure, addresses, clock

    def connect(self) -> None:
        plain = self._connect_plain()
        try:
            if self._is_secure:
                plain = ssl.create_default_context().wrap_socket(plain, server_hostname=self.host)
        except BaseException:
            plain.close()
            raise
        self.sock = _TimedSocket(plain, self._clock)

    def _connect_plain(self) -> socket.socket:
        error: OSError | None = None
        for number, (family, address) in enumerate(self._addresses):
            # A host that does not answer at its first address may at another.
            share = 1 if number == len(self._addresses) - 1 else 2
            plain = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            try:
                plain.settimeout(self._clock.left() / share)
                plain.connect(address)
                plain.settimeout(self._clock.left())
                return plain
            except OSError as failed:
                error = failed
                plain.close()
            except BaseException:
                plain.close()
                raise
        raise error or OSError("there is no address")


class _TimedSocket:
    """What http.client needs of a socket. Each call gets the time that is left of the whole, so that a server which
    sends a byte now and then does not get more."""

    def __init__(self, inner: socket.socket, clock: _Clock):
        self._inner, self._clock = inner, clock

    def sendall(self, data: Any) -> None:
        self._inner.settimeout(self._clock.left())
        self._inner.sendall(data)

    def makefile(self, mode: Any) -> io.BufferedReader:
        return io.BufferedReader(_TimedReader(self._read_into, self._inner.makefile(mode, buffering=0).close))

    def _read_into(self, buffer: Any) -> int:
        self._inner.settimeout(self._clock.left())
        return self._inner.recv_into(buffer)

    def close(self) -> None:
        self._inner.close()


class _TimedReader(io.RawIOBase):
    def __init__(self, read_into: Callable[[Any], int], close: Callable[[], None]):
        self._read_into, self._close = read_into, close

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._read_into(buffer)

    def close(self) -> None:
        if not self.closed:
            self._close()
        super().close()
