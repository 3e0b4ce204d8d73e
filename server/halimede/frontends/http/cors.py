"""Which pages of other sites may call the server from a browser (`--http-cors-origin`). Pure.

A browser sends a page's site in `Origin`, and shows the page an answer only if the answer allows the site. It sends
many requests without asking first, so an answer that the page may not read comes too late for calls with an effect.
Other clients send no `Origin`, and no rule here concerns them.

| call of a page | its site is named | `*` is given | neither |
|---|---|---|---|
| to read, or an inference | answered, the page may read it | answered, the page may read it | answered |
| to control the server | answered, the page may read it | refused | refused |

A page that the server's own address has delivered, perhaps through a proxy, counts as named for control calls.
"""

from collections.abc import Collection

from halimede.core.types import ApiCategory
from halimede.frontends.http.framing import Head
from halimede.frontends.http.routes import Route

ANY = "*"

_CONTROL = (ApiCategory.MODEL_REPOSITORY, ApiCategory.SHARED_MEMORY, ApiCategory.TRACE, ApiCategory.LOGGING)
_VARY = b"Vary: Origin\r\n"
_EXPOSED = b"Access-Control-Expose-Headers: Inference-Header-Content-Length\r\n"
_OF_ANY = b"Access-Control-Allow-Origin: *\r\n" + _EXPOSED
_MAX_AGE = b"Access-Control-Max-Age: 600\r\n"


class Cors:
    """The sites that a server allows: `origins` such as `https://a.example`, or ANY."""

    def __init__(self, origins: Collection[str]) -> None:
        self._named = frozenset(origin.encode() for origin in origins if origin != ANY)
        self._any = ANY in origins
        # An answer that names a site must not be cached for another one.
        self._vary = _VARY if self._named else b""

    def fields(self, head: Head) -> bytes:
        """The header lines of any answer to the request of `head`."""
        origin = head.headers.get(b"origin")
        if origin is None:
            return self._vary
        if origin in self._named:
            return b"Access-Control-Allow-Origin: %b\r\n%b%b" % (origin, _EXPOSED, self._vary)
        return _OF_ANY + self._vary if self._any else self._vary

    def preflight_fields(self, head: Head, route: Route) -> bytes | None:
        """Further header lines of the answer to a browser that asks whether a page may make a call.

        None if the request is another one, or if the page may not.
        """
        headers = head.headers
        wanted = headers.get(b"access-control-request-method")
        if head.method != b"OPTIONS" or wanted is None or b"origin" not in headers:
            return None
        if headers[b"origin"] not in self._named and (not self._any or _controls(wanted, route)):
            return None
        fields = b"Access-Control-Allow-Methods: %b\r\n" % b", ".join(route.methods)
        if asked := headers.get(b"access-control-request-headers"):
            fields += b"Access-Control-Allow-Headers: %b\r\n" % asked
        return fields + _MAX_AGE

    def refuses(self, head: Head, route: Route) -> bool:
        """Whether the request is a control call by a page that may not make it."""
        headers = head.headers
        origin = headers.get(b"origin")
        if origin is None or not _controls(head.method, route) or origin in self._named:
            return False
        # A proxy may replace Host, but no page can set Sec-Fetch-Site.
        if headers.get(b"sec-fetch-site") == b"same-origin":
            return False
        return origin.rpartition(b"://")[2].lower() != headers.get(b"host", b"").lower()


def _controls(method: bytes, route: Route) -> bool:
    return method == b"POST" and route.action.category in _CONTROL
