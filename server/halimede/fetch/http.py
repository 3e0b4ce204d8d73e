"""Fetch one file from a web server, with the standard library: presigned URLs, redirections, servers without ranges."""

import base64
import http.client
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from email.message import Message
from typing import IO, Any
from urllib.parse import urlsplit

from halimede.fetch.errors import MAX_CAUSE_CHARS, ChangedError, TransientError, cause_of
from halimede.fetch.proxy import proxies, through_proxy
from halimede.fetch.store_errors import OTHER_NAME, UNTRUSTED, classify_status, code_in, raise_classified
from halimede.fetch.tree import RemoteFile
from halimede_spec.uri import Uri

PIECE_BYTES = 1 << 20
_MAX_ERROR_BYTES = 1 << 14
_OTHER_NAME_CODES = (62, 64)
"""OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH."""


class _NoSuchRangeError(ChangedError):
    """The file ends before the requested range, but was longer when it was listed."""


class HttpSource:
    """`single` must be called first: it detects whether the server supports ranges."""

    def __init__(self, uri: Uri, credentials: Mapping[str, str], ca_bundle: bytes | None, read_secs: float) -> None:
        self._uri = uri
        self._read_secs = read_secs
        self._authorization = _authorization(credentials)
        self._opener = _opener(uri, ca_bundle, self._authorization)
        self._by = through_proxy(uri.address)
        self.is_ranged = False

    def single(self) -> RemoteFile | None:
        try:
            # A GET, because an address that is signed for GET refuses HEAD.
            opened = self._open({"Range": "bytes=0-0"})
        except _NoSuchRangeError:
            # An empty file has no first byte to request.
            opened = self._open({})
        with opened as answer:
            validator = _validator(answer.headers)
            total = _total(answer.headers.get("Content-Range")) if answer.status == 206 else None
            self.is_ranged = total is not None
            if answer.status == 200:
                length = answer.headers.get("Content-Length")
                total = int(length) if length is not None and length.isdecimal() else None
        return RemoteFile(self._uri.name, total, validator)

    def listing(self) -> list[RemoteFile]:
        return []

    def read(self, file: RemoteFile, start: int, stop: int | None) -> Iterator[bytes]:
        headers = {}
        if self.is_ranged and file.size != 0:
            headers["Range"] = f"bytes={start}-{stop - 1 if stop is not None else ''}"
            kind, _, value = file.validator.partition(":")
            # If the condition fails, some servers answer 412, and others with the whole new file.
            if kind == "etag" and not value.startswith("W/"):
                headers["If-Match"] = value
            elif kind == "date":
                headers["If-Unmodified-Since"] = value
        with self._open(headers) as answer:
            if _validator(answer.headers) != file.validator or ("Range" in headers and answer.status != 206):
                raise ChangedError
            if "Range" in headers and not answer.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
                raise TransientError("the server answers with another range than requested")
            if "Range" in headers and _total(answer.headers.get("Content-Range")) != file.size:
                raise ChangedError
            try:
                while piece := answer.read(PIECE_BYTES):
                    yield piece
            except (OSError, http.client.HTTPException) as error:
                raise TransientError(f"the connection was cut: {_words(error)}") from None

    # Any: a response of urllib, whose type has no public name.
    def _open(self, headers: Mapping[str, str]) -> Any:
        request = urllib.request.Request(self._uri.address, headers={"Accept-Encoding": "identity", **headers})  # noqa: S310 - the opener supports only http and https
        if self._authorization:
            # Redirections pass it on only to the same server.
            request.add_unredirected_header("Authorization", self._authorization)
        try:
            return self._opener.open(request, timeout=self._read_secs)
        except urllib.error.HTTPError as error:
            if error.code == 416:
                error.close()
                raise _NoSuchRangeError from None
            code, text = _code_of(error)
            by = through_proxy(error.url)
            # Only a proxy's own text is shown: a server's may be anything.
            said = f": {text}" if by and text else ""
            raise_classified(classify_status(error.code, code), self._uri.display, f"{by}{said}")
        except urllib.error.URLError as error:
            raise TransientError(f"the server cannot be reached{self._by}: {_words(error.reason)}") from None
        except (OSError, http.client.HTTPException) as error:
            raise TransientError(f"the server cannot be reached{self._by}: {_words(error)}") from None


def _code_of(error: urllib.error.HTTPError) -> tuple[str, str]:
    """The error code of a store that refuses a presigned address, and the first line of the body, or of the status."""
    try:
        with error:
            body = error.read(_MAX_ERROR_BYTES).decode(errors="replace")
    except (OSError, http.client.HTTPException):
        body = ""
    line = body.strip().partition("\n")[0]
    return code_in(body), (line if line and not line.startswith("<") else str(error.reason))[:MAX_CAUSE_CHARS]


def _words(error: object) -> str:
    """The error's text."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return OTHER_NAME if error.verify_code in _OTHER_NAME_CODES else UNTRUSTED
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return cause_of(error)


def _authorization(credentials: Mapping[str, str]) -> str:
    if token := credentials.get("TOKEN"):
        return f"Bearer {token}"
    if "USERNAME" in credentials or "PASSWORD" in credentials:
        pair = f"{credentials.get('USERNAME', '')}:{credentials.get('PASSWORD', '')}"
        return "Basic " + base64.b64encode(pair.encode()).decode()
    return ""


def _validator(headers: Message) -> str:
    if tag := headers.get("ETag"):
        return f"etag:{tag}"
    if date := headers.get("Last-Modified"):
        return f"date:{date}"
    return ""


def _total(content_range: str | None) -> int | None:
    """The size of the whole file in `bytes 0-0/1234`."""
    total = (content_range or "").rpartition("/")[2]
    return int(total) if total.isdecimal() else None


def _opener(uri: Uri, ca_bundle: bytes | None, authorization: str) -> urllib.request.OpenerDirector:
    context = ssl.create_default_context()
    if ca_bundle is not None:
        context.load_verify_locations(cadata=ca_bundle.decode("ascii", "replace"))
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(proxies()),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(context=context),
        _Redirect(uri.address, authorization),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    return opener


class _Redirect(urllib.request.HTTPRedirectHandler):
    """Follows redirections; credentials go only to the server that they are for, and never from https to http."""

    def __init__(self, address: str, authorization: str) -> None:
        self._server = urlsplit(address)[:2]
        self._authorization = authorization

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        before, after = urlsplit(req.full_url), urlsplit(newurl)
        if after.scheme not in ("http", "https") or (before.scheme == "https" and after.scheme == "http"):
            raise urllib.error.HTTPError(req.full_url, 403, "redirected away from https", headers, fp)
        made = super().redirect_request(req, fp, code, msg, headers, newurl)
        if made is not None and self._authorization and after[:2] == self._server:
            made.add_unredirected_header("Authorization", self._authorization)
        return made
