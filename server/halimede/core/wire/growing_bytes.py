"""Bytes that are inflated or decoded piece by piece, to a size that is not known before."""

import mmap

from halimede.core.types import Buffer

LARGE_BYTES = 8 << 20
_GROWTH_BYTES = 16 << 20


class GrowingBytes:
    """Large ones take hardly more memory than their size.

    A bytearray is moved when it grows, and then there are two for a moment: of 64 MiB they take 100. A mapping is moved
    without a copy.
    """

    __slots__ = ("_large", "_small", "size_bytes")

    def __init__(self) -> None:
        self._small = bytearray()
        self._large: mmap.mmap | None = None
        self.size_bytes = 0

    def add(self, piece: Buffer) -> None:
        begin, self.size_bytes = self.size_bytes, self.size_bytes + len(piece)
        if self.size_bytes <= LARGE_BYTES:
            self._small += piece
            return
        large = self._large
        if large is None:
            # A shared mapping, which is the default, would have no memory where it grows.
            large = self._large = mmap.mmap(-1, _GROWTH_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            large[:begin] = self._small
            self._small = bytearray()
        while self.size_bytes > len(large):
            large.resize(len(large) + _GROWTH_BYTES)
        large[begin : self.size_bytes] = piece

    def content(self) -> Buffer:
        """All bytes. Nothing may be added afterwards."""
        return self._small if self._large is None else memoryview(self._large)[: self.size_bytes]
