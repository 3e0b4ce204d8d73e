"""The proxies of the environment: HTTPS_PROXY, HTTP_PROXY, ALL_PROXY, NO_PROXY."""

from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass


def proxies() -> dict[str, str]:
    """The proxies by scheme, as the library of stores uses them. The standard library leaves ALL_PROXY out."""
    found = getproxies()
    return {scheme: proxy for scheme in ("http", "https") if (proxy := found.get(scheme) or found.get("all"))}


def through_proxy(address: str) -> str:
    """`, through the proxy http://host:port`, without its user and password; "" if requests go directly.

    For error texts, because a proxy's refusal looks like the server's.
    """
    parts = urlsplit(address)
    proxy = proxies().get(parts.scheme)
    if not proxy or not parts.hostname or proxy_bypass(parts.hostname):
        return ""
    scheme, _, rest = proxy.rpartition("://")
    return f", through the proxy {scheme or 'http'}://{rest.rpartition('@')[2].rstrip('/')}"
