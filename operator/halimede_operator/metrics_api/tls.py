"""TLS of the server: certificates that may change while it runs.

The certificate of the server and the CA of the front proxy are renewed from time to time. Every new connection gets a
context with the current ones. Sessions are never resumed, because a resumed session would keep trust in a CA that is
gone: TLS 1.3 without tickets has no resumption. A connection that outlives its CA is known by its context.
"""

import ssl
from pathlib import Path
from typing import Any

from halimede_operator.metrics_api.core.identity import Certificate


class Tls:
    def __init__(self, cert_file: Path, key_file: Path) -> None:
        """Raises OSError if the files cannot be read, and ssl.SSLError, an OSError, if they do not fit."""
        self._cert_file, self._key_file = cert_file, key_file
        self._authority = ""
        self._read: tuple[bytes, bytes, str] | None = None
        self._current: ssl.SSLContext
        self.listening = self._load()
        """The context for the listener: it hands every connection to the current one."""
        self.listening.sni_callback = self._choose
        self._current = self.listening

    def trust(self, authority: str) -> None:
        """Ask clients for certificates that this CA has signed. authority: as PEM. Raises OSError if it is none."""
        if authority == self._authority:
            return
        former, self._authority = self._authority, authority
        try:
            self._current = self._load()
        except OSError:
            self._authority = former
            raise

    def reload(self) -> None:
        """Read the certificate again if it changed. Raises OSError, and keeps the former one."""
        if self._files() != self._read:
            self._current = self._load()

    def certificate_of(self, connection: ssl.SSLObject) -> Certificate | None:
        """The client's certificate; None without one, or if its CA is no longer trusted."""
        # Any: nested tuples, which the types of the standard library do not tell apart.
        given: dict[str, Any] | None = connection.getpeercert()
        if not given or getattr(connection.context, "authority", None) != self._authority:
            return None
        names = [value for part in given["subject"] for key, value in part if key == "commonName"]
        return Certificate(str(names[0]) if names else "", ssl.cert_time_to_seconds(str(given["notAfter"])))

    def _files(self) -> tuple[bytes, bytes, str]:
        return self._cert_file.read_bytes(), self._key_file.read_bytes(), self._authority

    def _load(self) -> ssl.SSLContext:
        files = self._files()
        context = _Context(ssl.PROTOCOL_TLS_SERVER)
        context.authority = self._authority
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0
        context.load_cert_chain(self._cert_file, self._key_file)
        # The mode of the listening context counts for all connections.
        context.verify_mode = ssl.CERT_OPTIONAL
        if self._authority:
            context.load_verify_locations(cadata=self._authority)
        self._read = files
        return context

    def _choose(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = self._current


class _Context(ssl.SSLContext):
    authority: str
    """The CA of clients that the context trusts, as PEM; empty: none."""
