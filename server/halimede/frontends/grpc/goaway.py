"""Send GOAWAY on each gRPC connection of a port, so that clients connect elsewhere while the server continues to serve.

grpc has no API for that. Stopping its server sends GOAWAY, but also ends each call that arrives before the client has
read the frame. An age limit for connections loses no call, but it is fixed when grpc's server is made. So this module
writes the frame into grpc's own sockets. Its last stream is the highest possible: the client begins no further call on
the connection, its running calls continue, and calls that it has already sent are served. grpc is not involved.

The frame must not be written between two parts of one of grpc's frames. grpc writes whole frames, except to a socket
whose send buffer is full. So the frame is written only to a quiet connection: the bytes recently written to it, plus
those in its send buffer, are too few to have filled the buffer. It must be quiet several times in a row, because grpc's
thread may have to wait for a processor before it continues a frame.

The frame cannot be written to a TLS connection, so that its client gets no GOAWAY.
"""

import asyncio
import fcntl
import os
import socket
import stat
import struct
import termios
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

SEARCH_SECS = 0.25
"""Interval of the search for connections. A connection must be found twice: the client of a new one may still be
connecting, and would take GOAWAY for a failure and wait before it connects again."""

QUIET_SECS = 0.01
QUIET_TIMES = 8
QUIET_SHARE = 1 / 8
"""The part of its send buffer that a quiet connection writes in QUIET_SECS at most. When a full buffer has room again,
grpc writes at least a third of it at once."""

GOAWAY = b"\x00\x00\x08\x07\x00" + bytes(4) + (2**31 - 1).to_bytes(4, "big") + bytes(4)
"""Eight bytes of type 7 on stream 0: the highest stream that will be served, and no error."""

_TCP_INFO_BYTES_ACKED = 120
_TCP_INFO_SIZE = 128


@dataclass(frozen=True, slots=True)
class Written:
    """The bytes that grpc has written to a connection: `acked_bytes` are acknowledged, `queued_bytes` are not yet.
    `buffer_bytes` is the size of the send buffer."""

    acked_bytes: int
    queued_bytes: int
    buffer_bytes: int


def is_quiet(before: Written, now: Written) -> bool:
    """Whether grpc cannot be in the middle of a frame; `before` is QUIET_SECS earlier. The server writes first, so a
    connection without any written bytes is not yet established."""
    little = now.buffer_bytes * QUIET_SHARE
    written_bytes = now.acked_bytes + now.queued_bytes - before.acked_bytes - before.queued_bytes
    return before.acked_bytes > 0 and written_bytes <= little and now.queued_bytes <= little


async def send_away(port: int) -> None:
    """Send GOAWAY to the port's connections, including new ones, until cancelled."""
    notified: set[int] = set()
    known: set[int] = set()
    while True:
        before = {number: written for number, _, written in _connections(port, besides=notified)}
        found = set(before)
        quiet = found & known
        for remaining in reversed(range(QUIET_TIMES)):
            await asyncio.sleep(QUIET_SECS)
            now = {}
            for number, connection, written in _connections(port, besides=notified):
                if number not in quiet or not is_quiet(before[number], written):
                    continue
                now[number] = written
                if not remaining and _try_send(connection):
                    notified.add(number)
            before, quiet = now, set(now)
        known = found
        await asyncio.sleep(SEARCH_SECS)


def _connections(port: int, besides: set[int]) -> Iterator[tuple[int, socket.socket, Written]]:
    """The process's TCP connections with this local port, by inode number."""
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        # No file descriptor is free; the next search may find one.
        return
    for name in names:
        try:
            # A duplicate refers to the same connection even if grpc closes its own descriptor meanwhile.
            descriptor = os.dup(int(name))
        except OSError:
            continue
        status = os.fstat(descriptor)
        if status.st_ino in besides or not stat.S_ISSOCK(status.st_mode):
            os.close(descriptor)
            continue
        with socket.socket(fileno=descriptor) as found, suppress(OSError):
            # OSError: it is not a TCP connection, or its client has disconnected.
            if found.family in (socket.AF_INET, socket.AF_INET6) and found.getsockname()[1] == port:
                found.getpeername()
                yield status.st_ino, found, _written(found)


def _written(connection: socket.socket) -> Written:
    (queued_bytes,) = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_SIZE)
    (acked_bytes,) = struct.unpack_from("Q", info, _TCP_INFO_BYTES_ACKED)
    return Written(acked_bytes, queued_bytes, connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF))


def _try_send(connection: socket.socket) -> bool:
    try:
        # The send buffer has room: the frame goes as a whole.
        return connection.send(GOAWAY, socket.MSG_DONTWAIT) > 0
    except OSError:
        return False
