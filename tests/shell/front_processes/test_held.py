"""With nothing in progress no front-end process holds bytes of requests, however they have ended."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from halimede.front_processes.page import Page
from support.front_ends import TWO
from support.held_requests import OUTCOMES, SIZES, end_grpc_call, end_grpc_messages, end_http_request
from support.models import add_identity
from support.server import RunningServer, serving, wait_until


def page_of(server: RunningServer) -> Page:
    """The page that the server shares with its front-end processes."""
    for each in Path(f"/proc/{server.process.pid}/fd").iterdir():
        if "halimede-page" in os.readlink(each):
            descriptor = os.open(each, os.O_RDWR)
            try:
                return Page(descriptor, 2)
            finally:
                os.close(descriptor)
    raise AssertionError("the server has no page")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    repository = tmp_path_factory.mktemp("models")
    add_identity(repository, "wide", dims="-1")
    with serving(tmp_path_factory.mktemp("log"), [TWO, "--model-repository", repository]) as running:
        yield running


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_no_bytes_are_held_after_requests_of_any_size(server: RunningServer, outcome: str) -> None:
    page = page_of(server)
    totals = [page.http_totals(0).held_bytes, page.grpc_totals(0).held_bytes]

    def holds_nothing() -> None:
        wait_until(lambda: all(each.share() == 0 for each in totals), "no held bytes", server)

    ends: list[tuple[Callable[..., None], int]] = [
        (end_http_request, server.http_port),
        (end_grpc_call, server.grpc_port),
        (end_grpc_messages, server.grpc_port),
    ]
    for size in SIZES:
        for end, port in ends:
            end(port, outcome, size, "wide", holds_nothing)
    holds_nothing()
