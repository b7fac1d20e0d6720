"""Who may use the server: whoever has the key; without a key, programs of people and no page of somebody else's.

A page that a browser shows can send requests to this machine. Two ways need no permission of the server: a form or a
script posts text or multipart/form-data to it, which the browser marks by the page's `Origin`; and a name of the page's
owner becomes an address of this machine (DNS rebinding), which the `Host` shows.
"""

import hmac
from collections.abc import Iterable
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from nanovllm.integrations.serving.calls import error_body

_DEFAULT_PORTS = {"http": 80, "https": 443}


class Guard:
    """An ASGI application around another, which sees only requests that are allowed. It guards every route."""

    def __init__(self, app: Any, api_key: str | None, allowed_hosts: Iterable[str] = ()):
        """
        Args:
            api_key: what clients must send as `Authorization: Bearer KEY`. None: hosts and origins are looked at.
            allowed_hosts: names without a port by which the server may be called, beside addresses and localhost.

        Raises ValueError for a name that no host can have.
        """
        self._app = app
        self._key = None if api_key is None else api_key.encode()
        self._allowed = set(map(_checked_name, allowed_hosts))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and (refusal := self._refusal(Headers(scope=scope))) is not None:
            status, message, kind, code = refusal
            await JSONResponse(error_body(message, kind, code), status)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, headers: Headers) -> tuple[int, str, str, str | None] | None:
        """Status, message, type and code of the answer to a request that is not allowed."""
        if self._key is not None:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            if scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode(), self._key):
                return None
            message = "wrong API key: send the one of --api-key as 'Authorization: Bearer KEY'"
            return 401, message, "authentication_error", "invalid_api_key"
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        for name, value, is_allowed in [
            *(("Host", host, self._is_own(_host_of(f"//{host}"))) for host in hosts),
            *(("Origin", origin, self._is_local(origin, hosts)) for origin in origins),
        ]:
            if not is_allowed:
                remedy = "start the server with --allowed-hosts NAME, or --api-key"
                message = f"{name} {value[:200]!r} is not this server's: {remedy}"
                return 403, message, "permission_error", "foreign_host"
        return None

    def _is_own(self, host: str | None) -> bool:
        """Whether the server may be called so. An address cannot be the name of somebody else's page."""
        return host is not None and (host == "localhost" or host in self._allowed or _is_address(host))

    def _is_local(self, origin: str, hosts: list[str]) -> bool:
        """Whether a page is the server's own, of this machine, or of an allowed host. An address can be anybody's."""
        host = _host_of(origin)
        if host is None:
            return False
        is_loopback = host == "localhost" or (_is_address(host) and ip_address(host).is_loopback)
        return is_loopback or host in self._allowed or any(_place(origin) == _place(f"http://{each}") for each in hosts)


def _host_of(url: str) -> str | None:
    """The host of a URL, in lower case and without its port; None if there is none, as in `null`."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # Raises if it is none.
    except ValueError:
        return None
    has_more = parts.path or parts.query or parts.fragment or "@" in parts.netloc
    return None if parts.hostname is None or has_more else parts.hostname.rstrip(".")


def _place(url: str) -> tuple[str | None, int | None]:
    """Host and port."""
    parts = urlsplit(url) if _host_of(url) is not None else urlsplit("")
    return parts.hostname, parts.port or _DEFAULT_PORTS.get(parts.scheme)


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
        return True
    except ValueError:
        return False


def _checked_name(name: str) -> str:
    if _is_address(name):
        return name
    host = _host_of(f"//{name}")
    if host is None or any(each in name for each in ":*/ "):
        raise ValueError(f"allowed_hosts={name!r}: must be a name or an address, without a port, a scheme or a *")
    return host
