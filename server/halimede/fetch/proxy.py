"""The proxy through which requests to an address go, for error texts: a proxy's refusal looks like the server's."""

from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass


def through_proxy(address: str) -> str:
    """`, through the proxy http://host:port`, without its user and password; "" if requests go directly.

    The environment decides (HTTPS_PROXY, HTTP_PROXY, ALL_PROXY, NO_PROXY), for the standard library as for the library
    of stores.
    """
    parts = urlsplit(address)
    proxies = getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or not parts.hostname or proxy_bypass(parts.hostname):
        return ""
    scheme, _, rest = proxy.rpartition("://")
    return f", through the proxy {scheme or 'http'}://{rest.rpartition('@')[2].rstrip('/')}"
