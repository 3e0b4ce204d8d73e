"""What clients and readers of the log see must not depend on the number of front-end processes."""

import asyncio
import os
import socket
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from halimede.channel.process_end.channel import Channel
from halimede.channel.process_end.memory import Memory
from halimede.core.types import InferenceError, InferenceRequest, ServerMetadata
from halimede.front_processes.core_life import CoreLife
from halimede.front_processes.frames import FRONT_FRAMES
from halimede.front_processes.page import Page
from halimede.front_processes.remote import RemoteServer
from halimede.log import LogOutput
from support.background import in_background
from support.models import add_identity
from support.served import add_python
from support.server import LOOPBACK, RunningServer, start_command, start_server, wait_until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("models")
    add_identity(repository, "identity")
    add_python(repository, "python")
    running = start_server(tmp_path_factory.mktemp("log"), ["--model-repository", repository, "--frontend-processes=2"])
    yield running
    running.kill()


def test_a_request_that_is_not_accepted_gets_no_event_stream(server: RunningServer) -> None:
    for model, status in (("identity", 400), ("python", 400), ("missing", 404)):
        answer = server.post(f"/v2/models/{model}/generate_stream", {})
        assert (answer.status, answer.headers["content-type"]) == (status, "application/json"), answer.body
        assert model in answer.error


def test_the_warning_of_few_files_counts_those_of_all_processes(tmp_path: Path) -> None:
    command = ["prlimit", "--nofile=256:256", sys.executable, "-m", "halimede", "serve", *LOOPBACK]
    server = start_command(tmp_path, [*command, f"--model-repository={tmp_path}", "--frontend-processes=3"])
    try:
        wait_until(lambda: "may open" in server.log, "the warning", server)
        assert "each of 3 front-end processes may open 256 files: connections beyond 672 are turned away" in server.log
    finally:
        server.kill()


def test_a_front_end_whose_core_has_ended_logs_no_fault() -> None:
    faults: list[object] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: faults.append(context))
        core, front_end = socket.socketpair()
        channel = Channel(front_end.detach(), FRONT_FRAMES)
        descriptor = Page.create(1)
        page = Page(descriptor, 1)
        os.close(descriptor)
        server = RemoteServer(
            channel, Memory(channel), page, CoreLife(page, limit_secs=10), ServerMetadata("", "", ()), loop
        )
        ticket = server.infer(InferenceRequest("m", inputs=[]), faults.append)
        core.close()
        await asyncio.sleep(0)
        server.cancel(ticket)
        await asyncio.sleep(0)
        with pytest.raises(InferenceError, match="the server has ended"):
            server.model("m")
        with pytest.raises(InferenceError, match="the server has ended"):
            await server.devices()
        channel.disconnect()

    asyncio.run(main())
    assert faults == []


def test_processes_that_log_to_one_pipe_do_not_mix_lines(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    written = [[b"%d %03d %s\n" % (writer, number, b"x" * 200) for number in range(500)] for writer in range(2)]
    writing = [in_background(partial(LogOutput(path).write, lines)) for lines in written]
    os.set_blocking(reader, True)
    read = bytearray()
    while len(read) < sum(map(len, written[0] + written[1])):
        read += os.read(reader, 1000)
    os.close(reader)
    assert [each.result(30) for each in writing] == [(0, "")] * 2
    lines = bytes(read).splitlines(keepends=True)
    assert [[line for line in lines if line.startswith(b"%d " % writer)] for writer in range(2)] == written
