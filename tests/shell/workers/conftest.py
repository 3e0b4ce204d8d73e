"""Fixtures of the tests of workers."""

from collections.abc import Iterator

import pytest

from support.child_channel import Server


@pytest.fixture
def server() -> Iterator[Server]:
    each = Server()
    yield each
    each.close()
    each.channel.disconnect()
