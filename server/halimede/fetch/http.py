"""One file of a web server. By the standard library: presigned addresses, redirections and servers without ranges."""

import base64
import http.client
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from email.message import Message
from typing import IO, Any
from urllib.parse import urlsplit

from halimede.fetch.faults import ChangedFault, Exit, FetchError, TransientFault, judge_status, raise_verdict
from halimede.fetch.tree import RemoteFile
from halimede.fetch.uri import Uri

PIECE_BYTES = 1 << 20


class _NoSuchRangeError(ChangedFault):
    """The file ends before the range: when it was listed, it did not."""


class HttpSource:
    """`single` must come first: it finds out what the server can do."""

    def __init__(self, uri: Uri, credentials: Mapping[str, str], ca_bundle: bytes | None, read_secs: float) -> None:
        self._uri = uri
        self._read_secs = read_secs
        self._authorization = _authorization(credentials)
        self._opener = _opener(uri, ca_bundle, self._authorization)
        self.is_ranged = False

    def single(self) -> RemoteFile | None:
        try:
            # A GET, because what is signed for GET is refused for HEAD.
            opened = self._open({"Range": "bytes=0-0"})
        except _NoSuchRangeError:
            # A file of no bytes has no first one.
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
            # A condition that does not hold: some answer 412, and some with all of the new file.
            if kind == "etag" and not value.startswith("W/"):
                headers["If-Match"] = value
            elif kind == "date":
                headers["If-Unmodified-Since"] = value
        with self._open(headers) as answer:
            if _validator(answer.headers) != file.validator or ("Range" in headers and answer.status != 206):
                raise ChangedFault
            if "Range" in headers and not answer.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
                raise TransientFault("the server answers with another range than was asked for")
            if "Range" in headers and _total(answer.headers.get("Content-Range")) != file.size:
                raise ChangedFault
            try:
                while piece := answer.read(PIECE_BYTES):
                    yield piece
            except (OSError, http.client.HTTPException) as error:
                raise TransientFault(f"the connection was cut ({type(error).__name__})") from None

    # Any: an answer of urllib, whose type has no name of its own.
    def _open(self, headers: Mapping[str, str]) -> Any:
        request = urllib.request.Request(self._uri.address, headers={"Accept-Encoding": "identity", **headers})  # noqa: S310 - our opener knows http and https alone
        if self._authorization:
            # Not passed on when it is redirected, unless to the same server.
            request.add_unredirected_header("Authorization", self._authorization)
        try:
            return self._opener.open(request, timeout=self._read_secs)
        except urllib.error.HTTPError as error:
            status = error.code
            error.close()
            if status == 416:
                raise _NoSuchRangeError from None
            raise_verdict(judge_status(status), self._uri.display)
        except ssl.SSLCertVerificationError:
            raise self._untrusted() from None
        except urllib.error.URLError as error:
            if isinstance(error.reason, ssl.SSLCertVerificationError):
                raise self._untrusted() from None
            raise TransientFault(f"the server cannot be reached: {_words(error.reason)}") from None
        except (OSError, http.client.HTTPException) as error:
            raise TransientFault(f"the server cannot be reached: {_words(error)}") from None

    def _untrusted(self) -> FetchError:
        text = "its certificate is not trusted; a private authority's goes into a CA bundle"
        return FetchError(Exit.UNREACHABLE, f"{self._uri.display}: {text}")


def _words(error: object) -> str:
    """What the system says; not what a library does, which may repeat an address."""
    return getattr(error, "strerror", None) or type(error).__name__


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
        try:
            context.load_verify_locations(cadata=ca_bundle.decode("ascii", "replace"))
        except (ssl.SSLError, ValueError):
            raise FetchError(Exit.BAD_PLAN, f"{uri.display}: its CA bundle holds no certificate") from None
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(context=context),
        _Redirect(uri.address, authorization),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    return opener


class _Redirect(urllib.request.HTTPRedirectHandler):
    """Follows to other addresses; credentials go to the server that they are for, and never from https to http."""

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
