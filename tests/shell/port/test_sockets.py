"""Listening sockets: addresses and ports, unix paths, and options that accepted sockets inherit."""

import errno
import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from halimede.frontends.sockets import SocketAddress, bind, bind_addresses, bound_port


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
IPV4, IPV6 = (socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")
HERE: SocketAddress = (socket.AF_INET, ("127.0.0.1",))
ALSO_HERE: SocketAddress = (socket.AF_INET, ("127.0.0.2",))
ELSEWHERE: SocketAddress = (socket.AF_INET, ("192.0.2.1",))


def error(address: str, port: int = 0, **options: bool) -> str:
    with pytest.raises(OSError, match="failed to start HTTP service: ") as raised:
        close(bind(address, port, "HTTP", **options))
    return str(raised.value).removeprefix("failed to start HTTP service: ")


def close(sockets: list[socket.socket]) -> None:
    for sock in sockets:
        sock.close()


def serves(port: int, at: tuple[int, str]) -> bool:
    family, host = at
    with socket.socket(family) as client:
        return client.connect_ex((host, port)) == 0


def test_a_port_in_use_is_named() -> None:
    sockets = bind("127.0.0.1", 0, "HTTP")
    port = bound_port(sockets)
    for address in ("127.0.0.1", "0.0.0.0"):
        assert error(address, port) == f"Socket '{address}:{port}' already in use"
    close(sockets)
    again = bind("127.0.0.1", port, "HTTP")
    assert [sock.getsockname() for sock in again] == [("127.0.0.1", port)]
    close(again)


@needs_ipv6
def test_an_ipv6_address_is_named_in_brackets() -> None:
    sockets = bind("::1", 0, "HTTP")
    port = bound_port(sockets)
    assert error("::1", port) == f"Socket '[::1]:{port}' already in use"
    close(sockets)


def test_addresses_that_cannot_be_used_are_named() -> None:
    assert error("192.0.2.1") == "cannot listen on '192.0.2.1:0': Cannot assign requested address"
    assert error("not an address").startswith("address 'not an address': ")
    assert error("x" * 64) == f"address '{'x' * 64}': not a host name"


def test_all_addresses_of_a_name_have_one_port() -> None:
    sockets = bind_addresses([HERE, ELSEWHERE, ALSO_HERE], 0)
    port = bound_port(sockets)
    assert [sock.getsockname() for sock in sockets] == [("127.0.0.1", port), ("127.0.0.2", port)]
    close(sockets)


def test_one_address_that_is_in_use_releases_the_others() -> None:
    taken = bind_addresses([ALSO_HERE], 0)
    port = bound_port(taken)
    with pytest.raises(OSError, match="in use"):
        bind_addresses([HERE, ALSO_HERE], port)
    close(bind_addresses([HERE], port))
    close(taken)


def test_a_name_without_an_address_of_this_machine_is_refused() -> None:
    with pytest.raises(OSError, match="Cannot assign") as raised:
        bind_addresses([ELSEWHERE], 0)
    assert raised.value.errno == errno.EADDRNOTAVAIL


def test_no_free_port_for_all_addresses_is_an_error() -> None:
    with pytest.raises(OSError, match="in use") as raised:
        bind_addresses([(socket.AF_INET, ("0.0.0.0",)), HERE], 0)
    assert raised.value.errno == errno.EADDRINUSE


@needs_ipv6
@pytest.mark.parametrize(
    ("address", "any_family", "served"),
    [
        ("127.0.0.1", False, [IPV4]),
        ("::1", False, [IPV6]),
        ("0.0.0.0", False, [IPV4]),
        ("::", False, [IPV4, IPV6]),
        ("0.0.0.0", True, [IPV4, IPV6]),
        ("127.0.0.1", True, [IPV4]),
    ],
)
def test_wildcards_serve_both_families_where_asked(address: str, any_family: bool, served: list[Any]) -> None:
    sockets = bind(address, 0, "HTTP", any_family=any_family)
    assert [at for at in (IPV4, IPV6) if serves(bound_port(sockets), at)] == served
    close(sockets)


def test_the_socket_of_a_dead_server_is_replaced_and_of_a_live_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "s"
    close(bind(f"unix:{path}", 0, "HTTP"))  # like a server that was killed
    assert stat.S_ISSOCK(path.stat().st_mode)
    alive = bind(f"unix:{path}", 0, "HTTP")
    assert error(f"unix:{path}") == f"Socket 'unix:{path}' already in use"
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    close(alive)


def test_a_live_server_is_detected_even_if_it_accepts_nothing(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as waiting:
        busy.bind(str(tmp_path / "s"))
        busy.listen(0)
        waiting.connect(str(tmp_path / "s"))
        assert error(f"unix:{tmp_path}/s") == f"Socket 'unix:{tmp_path}/s' already in use"


def test_only_a_socket_is_ever_removed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    (tmp_path / "directory").mkdir()
    close(bind(f"unix:{tmp_path}/dead", 0, "HTTP"))
    (tmp_path / "link").symlink_to(tmp_path / "dead")
    for name in ("file", "directory", "link"):
        where = f"unix:{tmp_path}/{name}"
        assert error(where) == f"cannot listen on '{where}': a file of that name exists and is not a socket"
    assert (tmp_path / "file").read_text() == "precious"


def test_invalid_paths_are_refused(tmp_path: Path) -> None:
    long = f"unix:{tmp_path}/{'x' * 200}"
    for target, cause in (
        ("unix:", "a path must follow"),
        (f"unix:{tmp_path}/no/such", "No such file or directory"),
        (long, "AF_UNIX path too long"),
    ):
        assert error(target) == f"cannot listen on '{target}': {cause}"


def test_the_umask_sets_the_permissions_of_a_unix_socket(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        close(bind(f"unix:{tmp_path}/s", 0, "HTTP"))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o700


def test_servers_share_a_port_only_if_all_request_it() -> None:
    first = bind("127.0.0.1", 0, "HTTP", reuse_port=True)
    port = bound_port(first)
    assert error("127.0.0.1", port) == f"Socket '127.0.0.1:{port}' already in use"
    second = bind("127.0.0.1", port, "HTTP", reuse_port=True)
    assert bound_port(second) == port
    close([*first, *second])
    alone = bind("127.0.0.1", 0, "HTTP")
    port = bound_port(alone)
    assert error("127.0.0.1", port, reuse_port=True) == f"Socket '127.0.0.1:{port}' already in use"
    close(alone)


def test_two_servers_on_one_port_both_serve(serve: Any) -> None:
    first = serve(sockets=bind("127.0.0.1", 0, "Echo", reuse_port=True))
    second = serve(sockets=bind("127.0.0.1", first.address[1], "Echo", reuse_port=True))
    clients = [first.use() for _ in range(100)]
    counts = [running.port.connection_count for running in (first, second)]
    assert sum(counts) == 100
    assert min(counts) > 0  # the chance of a false failure is 2^-99
    for client in clients:
        client.close()


def test_keepalive_detects_a_vanished_peer_within_two_minutes(serve: Any) -> None:
    accepted: list[socket.socket] = []
    with serve().use() as client:
        # The test's process has both ends: the peer name of the other end is this socket's name.
        for number in os.listdir("/proc/self/fd"):
            try:
                found = socket.socket(fileno=os.dup(int(number)))
            except OSError:
                continue
            try:
                if found.family == socket.AF_INET and found.getpeername() == client.getsockname():
                    accepted.append(found)
                    continue
            except OSError:
                pass
            found.close()
        (server_side,) = accepted
        with server_side:
            tcp = socket.IPPROTO_TCP
            assert server_side.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert [
                server_side.getsockopt(tcp, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
            ] == [60, 15, 4, 120_000]
            assert server_side.getsockopt(tcp, socket.TCP_NODELAY) == 1
