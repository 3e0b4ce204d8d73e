"""The zygote alone, with commands on its socket."""

import json
import os
import random
import socket
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from halimede.processes.launcher import Zygote
from halimede.processes.zygote import DESCRIPTORS, MAX_COMMAND_BYTES
from support.processes import open_files
from support.server import wait_until
from support.workers import FOLDER, LIMIT_S, OBEY, is_alive

SPAWN = {
    "do": "spawn",
    "worker": 1,
    "name": "m",
    "python": "",
    "environment": {},
    "directory": "",
    "entry": OBEY,
    "module": "",
}


@pytest.fixture
def zygote(monkeypatch: pytest.MonkeyPatch) -> Iterator[Zygote]:
    monkeypatch.setenv("PYTHONPATH", FOLDER)
    zygote = Zygote()
    yield zygote
    zygote.end(LIMIT_S)


class Ends:
    """A worker's sockets and its pipe, both ends."""

    def __init__(self) -> None:
        self.channel, self.worker_channel = socket.socketpair()
        self.status, self.worker_status = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.output, self.worker_output = os.pipe()
        self.channel.settimeout(LIMIT_S)
        self.status.settimeout(LIMIT_S)

    def __enter__(self) -> "Ends":
        return self

    def __exit__(self, *_: object) -> None:
        self.hand_over()
        self.channel.close()
        self.status.close()
        os.close(self.output)

    @property
    def worker_ends(self) -> tuple[int, int, int]:
        return self.worker_channel.fileno(), self.worker_output, self.worker_status.fileno()

    def hand_over(self) -> None:
        """Close the worker's ends, which the zygote now has."""
        self.worker_channel.close()
        self.worker_status.close()
        if self.worker_output >= 0:
            os.close(self.worker_output)
            self.worker_output = -1

    def report(self) -> object:
        return json.loads(self.status.recv(4096) or b'"closed"')

    def ask(self, code: str) -> object:
        self.channel.sendall(json.dumps(code).encode() + b"\n")
        return json.loads(self.channel.recv(65536))


def test_a_worker_is_spawned_killed_and_reported(zygote: Zygote):
    with Ends() as ends:
        zygote.send(SPAWN, ends.worker_ends)
        ends.hand_over()

        pid = ends.ask("__import__('os').getpid()")
        zygote.send({"do": "kill", "worker": 1, "signal": 15})

        assert [ends.report(), ends.report(), ends.report()] == [{"pid": pid}, {"signal": 15}, "closed"]
        assert ends.channel.recv(1) == b""


def wait_for_descriptors(zygote: Zygote, workers: int) -> None:
    """The standard streams, the command socket, the wake-up pipe, and a status socket for each worker."""
    wait_until(lambda: open_files(zygote.process.pid) == 6 + workers, f"the zygote to hold those of {workers} workers")


def test_the_zygote_has_one_thread(zygote: Zygote):
    # It is serving: its imports are done.
    wait_for_descriptors(zygote, workers=0)

    assert len(os.listdir(f"/proc/{zygote.process.pid}/task")) == 1


def test_the_zygote_keeps_only_status_sockets_of_its_workers(zygote: Zygote):
    with Ends() as first, Ends() as second:
        for number, ends in enumerate((first, second)):
            zygote.send({**SPAWN, "worker": number}, ends.worker_ends)
            ends.hand_over()
            ends.ask("1")

        wait_for_descriptors(zygote, workers=2)
        first.channel.close()
        wait_for_descriptors(zygote, workers=1)


GARBAGE = [
    b"\x00",
    b"{",
    b"\xff\xfe",
    b"[]",
    b"7",
    b"[" * 100_000,
    b"{}",
    b'{"do": "spawn"}',
    b'{"do": "dance", "worker": 1}',
    b'{"do": ["kill"], "worker": 1, "signal": 9}',
    b'{"do": "kill", "worker": "1", "signal": 9}',
    b'{"do": "kill", "worker": 1, "signal": 9.0}',
    b'{"do": "kill", "worker": 1, "signal": 100000000000000000000}',
    b'{"do": "kill", "worker": 1, "signal": 4711}',
    b'{"do": "kill", "worker": 4711, "signal": 9}',
    json.dumps({**SPAWN, "worker": None}).encode(),
    json.dumps({**SPAWN, "environment": []}).encode(),
    json.dumps({**SPAWN, "more": 1}).encode(),
    b"x" * (MAX_COMMAND_BYTES + 1000),
]


def test_the_zygote_ignores_invalid_commands(zygote: Zygote):
    with Ends() as ends, Ends() as others:
        zygote.send(SPAWN, ends.worker_ends)
        ends.hand_over()
        assert ends.ask("1 + 1") == 2
        chance = random.Random(1)
        command = zygote.command

        for piece in [*GARBAGE, *(chance.randbytes(chance.randrange(1, 500)) for _ in range(200))]:
            command.send(piece)
            given = others.worker_ends * chance.randrange(3) + others.worker_ends[: chance.randrange(3)]
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, b"".join(number.to_bytes(4, "little") for number in given))
            command.sendmsg([piece], [rights] if given else [])
        command.sendmsg([json.dumps(SPAWN).encode()], [])
        two = DESCRIPTORS.pack(*others.worker_ends)[:8]
        command.sendmsg([json.dumps(SPAWN).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, two)])

        assert ends.ask("2 + 2") == 4
        with Ends() as next_:
            zygote.send({**SPAWN, "worker": 2}, next_.worker_ends)
            assert next_.ask("3 + 3") == 6
            wait_for_descriptors(zygote, workers=2)
            assert len(psutil.Process(zygote.process.pid).children()) == 2


def test_the_zygote_kills_all_and_ends_when_its_socket_closes(zygote: Zygote):
    with Ends() as ends:
        zygote.send(SPAWN, ends.worker_ends)
        ends.hand_over()
        pid = ends.ask("__import__('os').getpid()")
        ends.channel.sendall(b'"import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"\n')

        began = time.monotonic()
        zygote.end(LIMIT_S)

        # The goal is 1 s.
        assert time.monotonic() - began < 5
        assert zygote.process.returncode == 0
        assert [ends.report(), ends.report()] == [{"pid": pid}, "closed"]
        assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("python", ["", sys.executable], ids=["forked", "executed"])
def test_a_worker_dies_with_its_zygote(zygote: Zygote, python: str):
    with Ends() as ends:
        zygote.send({**SPAWN, "python": python}, ends.worker_ends)
        pid = ends.ask("__import__('os').getpid()")
        assert isinstance(pid, int)

        zygote.process.kill()

        wait_until(lambda: not is_alive(pid), "the worker to die")


def test_a_worker_whose_status_socket_is_closed_is_reaped(zygote: Zygote):
    with Ends() as ends:
        zygote.send(SPAWN, ends.worker_ends)
        ends.ask("1")
    children = psutil.Process(zygote.process.pid).children

    wait_until(lambda: children() == [], "the worker to be reaped")
    with Ends() as next_:
        zygote.send({**SPAWN, "worker": 2}, next_.worker_ends)
        assert next_.ask("1") == 1
