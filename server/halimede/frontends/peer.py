"""The address of a client, for the access log."""


def client_of(peer: object) -> str:
    """A peer's address as text; the peer of a unix socket has none."""
    match peer:
        case (str(host), int(port), *_):
            return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return "unix"
