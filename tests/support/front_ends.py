"""The front-end processes of a running server, and connections to each of them."""

import http.client
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psutil
import tritonclient.grpc as grpcclient

from support.served import children, zygotes
from support.server import Answer, RunningServer, wait_until

TWO = "--frontend-processes=2"
NAME = "front-end-"
MAX_TRIES = 200

# From linux/netlink.h, linux/sock_diag.h and linux/inet_diag.h.
NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
NLM_F_REQUEST = 1
NLMSG_ERROR = 2
DIAG_TCP = (socket.AF_INET, socket.IPPROTO_TCP)
ANY_STATE = 0xFFFFFFFF
NO_COOKIE = b"\xff" * 8


def front_ends(server: RunningServer) -> list[psutil.Process]:
    """In the order of their numbers."""
    found = []
    for parent in zygotes(server):
        for each in children(parent.pid):
            try:
                if each.name().startswith(NAME):
                    found.append((each.name(), each))
            except psutil.NoSuchProcess:
                continue
    return [each for _, each in sorted(found, key=lambda one: one[0])]


def wait_for_front_ends(server: RunningServer, count: int = 2, besides: Sequence[psutil.Process] = ()) -> None:
    """Wait until so many run, none of which is one of `besides`, and each accepts a connection."""
    wait_until(
        lambda: (
            len(found := front_ends(server)) == count and not {each.pid for each in found} & {e.pid for e in besides}
        ),
        f"{count} front-end processes",
        server,
    )
    with connections_to_each(server, count):
        pass


def open_connections(process: psutil.Process, port: int) -> int:
    """How many connections of clients to this port the process has accepted."""
    return sum(
        each.status == psutil.CONN_ESTABLISHED and each.laddr.port == port for each in process.net_connections("tcp")
    )


def owner(server: RunningServer, client: socket.socket) -> int | None:
    """The pid of the process that accepted this connection; None if none has yet or its process ended."""
    accepted = f"socket:[{tcp_inode(client.getpeername(), client.getsockname())}]"
    for pid in (*(each.pid for each in front_ends(server)), server.process.pid):
        if accepted in _files(pid):
            return pid
    return None


def _files(pid: int) -> Iterator[str]:
    """The open files of a process, which may end or close some meanwhile."""
    with suppress(FileNotFoundError), os.scandir(f"/proc/{pid}/fd") as descriptors:
        for each in descriptors:
            with suppress(FileNotFoundError):
                yield os.readlink(each.path)


def tcp_inode(local: tuple[str, int], remote: tuple[str, int]) -> int:
    """The inode of the connected IPv4 socket with these addresses; 0 if it has not been accepted.

    The kernel looks one socket up (sock_diag(7)). /proc/net/tcp lists all of them, which takes 20 ms.

    Raises FileNotFoundError if there is no such socket.
    """
    size = 72
    identity = struct.pack(
        "!HH4s12x4s12x", local[1], remote[1], socket.inet_aton(local[0]), socket.inet_aton(remote[0])
    )
    request = struct.pack("=IHHIIBBBxI", size, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 0, 0, *DIAG_TCP, 0, ANY_STATE)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, NETLINK_SOCK_DIAG) as diagnosis:
        diagnosis.send(request + identity + struct.pack("=I", 0) + NO_COOKIE)
        answer = diagnosis.recv(4096)
    if struct.unpack_from("=H", answer, 4)[0] == NLMSG_ERROR:
        code = -struct.unpack_from("=i", answer, 16)[0]
        raise OSError(code, os.strerror(code))
    return struct.unpack_from("=I", answer, 84)[0]


@dataclass
class Connection:
    """A persistent HTTP connection, and the pid of the front end that serves it."""

    pid: int
    http: http.client.HTTPConnection

    def request(self, method: str, path: str, body: bytes | str = b"", headers: dict[str, str] | None = None) -> Answer:
        self.http.request(method, path, body or None, headers or {})
        response = self.http.getresponse()
        return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())

    def get(self, path: str) -> Answer:
        return self.request("GET", path)

    def post(self, path: str, body: bytes | str = b"", headers: dict[str, str] | None = None) -> Answer:
        return self.request("POST", path, body, headers)


def connect(server: RunningServer) -> Connection:
    """A connection that a front end, or the core of a server without any, has accepted."""
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
    connection.request("GET", "/v2/health/live")
    assert connection.getresponse().read() == b""
    pid = owner(server, connection.sock)
    assert pid is not None
    return Connection(pid, connection)


@contextmanager
def connections_to_each(server: RunningServer, count: int = 2, each: int = 1) -> Iterator[list[Connection]]:
    """At least `each` connections to every front end, in the order of the processes."""
    made: list[Connection] = []
    try:
        for _ in range(MAX_TRIES):
            made.append(connect(server))
            pids = [one.pid for one in made]
            if len(set(pids)) == count and min(map(pids.count, set(pids))) >= each:
                break
        else:
            raise AssertionError(f"{MAX_TRIES} connections were all accepted by {set(pids)}")
        order = [process.pid for process in front_ends(server)]
        yield sorted(made, key=lambda one: order.index(one.pid))
    finally:
        for one in made:
            one.http.close()


@contextmanager
def grpc_clients_of_each(server: RunningServer, count: int = 2) -> Iterator[list[grpcclient.InferenceServerClient]]:
    """Clients with connections of their own, so many that every front end serves at least one."""
    made: list[grpcclient.InferenceServerClient] = []
    before = [open_connections(process, server.grpc_port) for process in front_ends(server)]
    try:
        while len(made) < count or any(
            open_connections(process, server.grpc_port) <= had
            for process, had in zip(front_ends(server), before, strict=True)
        ):
            assert len(made) < MAX_TRIES, "one front end accepts no gRPC connection"
            made.append(grpc_client(server.grpc_url))
            assert made[-1].is_server_live()
        yield made
    finally:
        for each in made:
            each.close()


def grpc_client(url: str, **options: object) -> grpcclient.InferenceServerClient:
    """A client with a connection of its own: by default all channels of a process share one."""
    return grpcclient.InferenceServerClient(
        url, channel_args=[("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)], **options
    )
