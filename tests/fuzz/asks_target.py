"""The fuzz target of what a front-end process asks the core."""

from contextlib import suppress

from halimede.channel.frames import HEADER, FrameError
from halimede.front_processes.asks import decode_ask, encode_ask


def asks(data: bytes) -> None:
    """The body of an ASK frame: what is taken is a question that a front end asks, and has its types."""
    with suppress(FrameError):
        asked = decode_ask(data)
        assert decode_ask(encode_ask(*asked)[HEADER.size :]) == asked
