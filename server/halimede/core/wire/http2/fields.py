"""Header blocks: HPACK, and which fields a request may have (RFC 7541; RFC 9113 sections 8.2 and 8.3)."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from hpack import Decoder, HPACKError, OversizedHeaderListError

from halimede.core.wire.http2.codes import ConnectionFault, H2Code, StreamFault
from halimede.core.wire.http2.limits import USUAL_FIELDS

Field = tuple[bytes, bytes]
T = TypeVar("T")

MAX_HEADER_LIST_BYTES = 64 << 10
"""The fields of one block, decoded, with 32 bytes for each as in RFC 7541 section 4.1. Above it the connection ends: a
block that is not decoded to its end leaves the HPACK tables of both sides different."""

MAX_SIZE_UPDATES = 2
"""RFC 7541 section 4.2: the smallest size of the dynamic table since the last block, and the final one. Each costs a
byte of the block and some microseconds, so a block of nothing else would take a tenth of a second."""

_CACHED_BLOCKS = 16
_CACHED_BLOCK_BYTES = 512

_SIZE_UPDATES = re.compile(rb"(?:[\x20-\x3e]|\x3f[\x80-\xff]*[\0-\x7f]){%d}" % (MAX_SIZE_UPDATES + 1))
"""Too many of them at the start of a block (sections 5.1 and 6.3); elsewhere none is valid."""
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_FORBIDDEN_IN_VALUE = re.compile(rb"[\0\r\n]")
_SPACE_AROUND = re.compile(rb"^[ \t]|[ \t]$")
"""Section 8.2.1 forbids it in every value. But gRPC permits it in metadata, and its clients send it there."""
_PSEUDO = frozenset({b":method", b":scheme", b":path", b":authority"})
_OF_A_CONNECTION = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"})


@dataclass(frozen=True, slots=True)
class RequestFields:
    """The checked fields of a request; `fields` has those that are not pseudo-header fields, in order."""

    method: bytes
    path: bytes
    fields: tuple[Field, ...]
    content_length: int | None


class HeaderBlocks(Generic[T]):
    """The header blocks that one client sends. `interpret` makes the application's value of a request's fields.

    Clients repeat their blocks: once its fields are in the dynamic table, a block of grpc's clients is some ten
    indices, equal in every call. So values are cached by the bytes of the block, until a block changes the dynamic
    table. `unusual_fields` counts the fields above USUAL_FIELDS of a block, until the caller has charged for them.
    """

    __slots__ = ("_cache", "_decoder", "_interpret", "unusual_fields")

    def __init__(self, interpret: Callable[[RequestFields], T]) -> None:
        self._decoder = Decoder(max_header_list_size=MAX_HEADER_LIST_BYTES)
        self._interpret = interpret
        self._cache: dict[bytes, tuple[T, int | None]] = {}
        self.unusual_fields = 0

    def request(self, block: bytes) -> tuple[T, int | None]:
        """The value of a request's block, and its content-length. StreamFault for a malformed request."""
        found = self._cache.get(block)
        if found is not None:
            return found
        table = self._decoder.header_table
        entries = table.dynamic_entries
        before = (len(entries), entries[0] if entries else None, table.maxsize)
        fields = self._decode(block)
        newest = entries[0] if entries else None
        is_unchanged = len(entries) == before[0] and newest is before[1] and table.maxsize == before[2]
        if not is_unchanged:
            self._cache.clear()
        checked = check_request(fields)
        request = self._interpret(checked), checked.content_length
        if is_unchanged and len(block) <= _CACHED_BLOCK_BYTES and len(self._cache) < _CACHED_BLOCKS:
            self._cache[block] = request
        return request

    def trailers(self, block: bytes) -> None:
        """Decode a block after the DATA of a request. StreamFault if it has fields that trailers must not have."""
        self.skip(block, check_trailers)

    def skip(self, block: bytes, check: Callable[[Sequence[Field]], object] = lambda _: None) -> None:
        """Decode a block whose fields are of no use: the tables of both sides must stay equal."""
        fields = self._decode(block)
        self._cache.clear()
        check(fields)

    def _decode(self, block: bytes) -> Sequence[Field]:
        if _SIZE_UPDATES.match(block):
            raise ConnectionFault(H2Code.COMPRESSION_ERROR, f"more than {MAX_SIZE_UPDATES} updates of the table's size")
        try:
            fields = tuple(self._decoder.decode(block, raw=True))
        except OversizedHeaderListError:
            raise ConnectionFault(
                H2Code.ENHANCE_YOUR_CALM, f"a header list of more than {MAX_HEADER_LIST_BYTES} bytes"
            ) from None
        except HPACKError:
            raise ConnectionFault(H2Code.COMPRESSION_ERROR, "a header block that is no valid HPACK") from None
        if len(fields) > USUAL_FIELDS:
            self.unusual_fields += len(fields) - USUAL_FIELDS
        return fields


def check_request(fields: Iterable[Field]) -> RequestFields:
    """The fields of a request, or StreamFault if it is malformed (section 8.1.1)."""
    pseudo: dict[bytes, bytes] = {}
    regular: list[Field] = []
    content_length: int | None = None
    for name, value in fields:
        if name[:1] == b":":
            if regular:
                raise _malformed("a pseudo-header field after a regular one")
            if name in pseudo or name not in _PSEUDO:
                raise _malformed("a pseudo-header field that is repeated or undefined")
            if _SPACE_AROUND.search(value):
                raise _malformed("a pseudo-header field with white space around its value")
            pseudo[name] = value
        else:
            _check_regular(name, value)
            if name == b"content-length":
                before, content_length = content_length, _content_length(value)
                if before not in (None, content_length):
                    raise _malformed("content-length is repeated with another value")
            regular.append((name, value))
        _check_value(value)
    method, path = pseudo.get(b":method"), pseudo.get(b":path")
    if not method or not path or b":scheme" not in pseudo:
        raise _malformed("a request without :method, :scheme or :path")
    return RequestFields(method, path, tuple(regular), content_length)


def check_trailers(fields: Iterable[Field]) -> None:
    """StreamFault for fields that trailers must not have (section 8.1)."""
    for name, value in fields:
        if name[:1] == b":":
            raise _malformed("a pseudo-header field in trailers")
        _check_regular(name, value)
        _check_value(value)


def _check_regular(name: bytes, value: bytes) -> None:
    if _NAME.fullmatch(name) is None:
        raise _malformed("a field name with forbidden characters")
    if name in _OF_A_CONNECTION or (name == b"te" and value != b"trailers"):
        raise _malformed("a field that belongs to a connection of HTTP/1.1")


def _check_value(value: bytes) -> None:
    if _FORBIDDEN_IN_VALUE.search(value):
        raise _malformed("a field value with forbidden characters")


def _content_length(value: bytes) -> int:
    if not value.isdigit() or len(value) > 18:
        raise _malformed("a content-length that is no number")
    return int(value)


def _malformed(text: str) -> StreamFault:
    return StreamFault(H2Code.PROTOCOL_ERROR, text)


def literal(name: bytes, value: bytes) -> bytes:
    """A field as a literal that is not indexed (RFC 7541 section 6.2.2), which needs no table on either side."""
    return b"\x00" + _string(name) + _string(value)


def _string(text: bytes) -> bytes:
    size = len(text)
    if size < 127:
        return bytes((size,)) + text
    # RFC 7541 section 5.1: seven bits of the length at a time.
    prefix = bytearray((127,))
    size -= 127
    while size >= 128:
        prefix.append(size & 127 | 128)
        size >>= 7
    prefix.append(size)
    return bytes(prefix) + text
