"""A connection does what the plain model of RFC 9113 does, whatever a client sends and however its bytes are cut."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from struct import pack
from typing import NamedTuple

from hypothesis import given, settings

from halimede.core.wire.http2.codes import H2Code
from halimede.core.wire.http2.limits import Http2Limits
from support.examples import Draws, drawn, examples
from support.http2 import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PRIORITY_FIELDS,
    REQUEST,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Frame,
    Wire,
    block,
    frame,
    padded,
)
from support.http2 import settings as settings_frame
from support.http2_model import Http2Model

LIMITS = Http2Limits(max_streams=3, window=40, connection_window=66_000)
Step = tuple[str, *tuple[object, ...]]

PLAIN = block(REQUEST)
ADDED = b"\x40\1x\x011"
"""A field that enters the dynamic table."""
ADDED_BAD = b"\x40\x0aconnection\x011"
"""One that makes each request malformed whose block refers to it."""
NEWEST = b"\xbe"
"""The newest field of the dynamic table."""
BLOCKS = [
    PLAIN,
    PLAIN,
    block((*REQUEST, (b"content-length", b"3"))),
    PLAIN + ADDED,
    PLAIN + ADDED_BAD,
    PLAIN + NEWEST,
    PLAIN + NEWEST,
    block(REQUEST[1:]),
    block((*REQUEST, (b"X", b"1"))),
    block((*REQUEST, REQUEST[0])),
]
TRAILERS = [b"", NEWEST, ADDED, ADDED_BAD, block([(b":path", b"/")])]

WHICH = tuple(range(7))
SIZES = (0, 1, 3, 10, 20, 41)
WINDOWS = (1, 2, 5, 30, 70_000, 1, 2, 5, 30, 0, 2**31 - 1)
PADDING = (None, None, None, 0, 3)
BOOLS = (False, True)
RARELY = (False, False, False, True)

Form = tuple[str, *tuple[Sequence[object], ...]]
"""The name of a step, and the values of each argument."""
CLIENT: tuple[Form, ...] = (
    ("begin", BLOCKS, RARELY, tuple(range(10))),
    ("begin", (PLAIN,), RARELY, (0,)),
    ("data", WHICH, SIZES, RARELY, PADDING),
    ("data", WHICH, SIZES, (False,), PADDING),
    ("trailers", WHICH, TRAILERS, (True, True, True, False)),
    ("window", WHICH, WINDOWS),
    ("settings", ((4, 0), (4, 5), (4, 30), (4, 2**31 - 1), (5, 16_384), (2, 0), (9, 1))),
)
RARE: tuple[Form, ...] = (
    ("reset", WHICH),
    ("ping", BOOLS, (b"12345678", b"shutdown", b"lastcall")),
    ("priority", WHICH, (bytes(5), bytes(4), b"\0\0\0\1\0")),
    ("goaway",),
    ("data", WHICH, (*(16_384,) * 9, 16_385), BOOLS, (None,)),
    (
        "frame",
        tuple(range(12)),
        (0, 1, 4, 5, 8, 12, 0x20, 0x2C),
        tuple(range(9)),
        (b"", b"\0", b"\3\0", bytes(4), bytes(5), bytes(6), bytes(8), b"\0\2\0\0\0\2"),
    ),
)
APPLICATION: tuple[Form, ...] = (
    ("respond", WHICH),
    ("send", WHICH, (1, 4, 20, 20, 17_000, 70_000)),
    ("finish", WHICH),
    ("answer", WHICH, (0, 3, 20, 17_000)),
    ("use", WHICH, tuple(range(1, 31))),
    ("room", (0, 3, 10, 40_000, 10**6, 10**6)),
)
RARE_APPLICATION: tuple[Form, ...] = (
    ("cancel", WHICH),
    ("expect", WHICH, tuple(range(1, 101))),
    ("send_away",),
    ("shut_down",),
    ("send_final_goaway",),
)
# Rare ones are a quarter of all: many of them end a connection.
FORMS = (*((each,) for each in (*CLIENT, *CLIENT, *APPLICATION, *APPLICATION)), *(RARE, RARE_APPLICATION) * 4)
GREETINGS = (*(settings_frame(s4=3),) * 20, *(frame(SETTINGS),) * 10, frame(SETTINGS, ACK), frame(PING))


class Play(NamedTuple):
    steps: list[Step]
    cuts: list[int]
    is_answered: bool
    greeting: bytes


def step(draws: Draws) -> Step:
    name, *arguments = draws.pick(draws.pick(FORMS))
    return (name, *(draws.pick(values) for values in arguments))


def play(draws: Draws) -> Play:
    cuts = [draws.below(1 << 16) for _ in range(draws.below(7))]
    is_answered, greeting = draws.pick(BOOLS), draws.pick(GREETINGS)
    return Play([step(draws) for _ in range(12 + draws.below(19))], cuts, is_answered, greeting)


class Client:
    """Makes the frames of a step. The numbers of streams grow, and other frames mostly are of an open stream."""

    def __init__(self, model: Http2Model) -> None:
        self._model = model
        self._next = 1
        self._used: list[int] = []

    def frames(self, name: str, *arguments: object) -> list[bytes]:
        made: list[bytes] = getattr(self, name)(*arguments)
        return made

    def begin(self, content: bytes, is_end: bool, how: int) -> list[bytes]:
        stream = self._next + (2 if how == 1 else 0)
        self._next = stream + 2
        self._used.append(stream)
        flags = END_STREAM if is_end else 0
        match how:
            case 2:
                cut = len(content) // 2
                continuations = [frame(CONTINUATION, 0, stream, content[cut:-3])]
                continuations.append(frame(CONTINUATION, END_HEADERS, stream, content[-3:]))
                return [frame(HEADERS, flags, stream, content[:cut]), *continuations]
            case 3:
                flags |= PADDED
                content = padded(content, 4)
            case 4 | 5:
                flags |= PRIORITY_FIELDS
                content = pack(">IB", stream if how == 4 else 1, 0) + content
        return [frame(HEADERS, flags | END_HEADERS, stream, content)]

    def data(self, which: int, size: int, is_end: bool, padding: int | None) -> list[bytes]:
        content = bytes(index % 251 for index in range(size))
        flags = END_STREAM if is_end else 0
        if padding is not None:
            flags, content = flags | PADDED, padded(content, padding)
        return [frame(DATA, flags, self._stream(which), content)]

    def trailers(self, which: int, content: bytes, is_end: bool) -> list[bytes]:
        return [frame(HEADERS, END_HEADERS | (END_STREAM if is_end else 0), self._stream(which), content)]

    def window(self, which: int, size: int) -> list[bytes]:
        return [frame(WINDOW_UPDATE, 0, 0 if which == 6 else self._stream(which), pack(">I", size))]

    def settings(self, setting: tuple[int, int]) -> list[bytes]:
        return [frame(SETTINGS, 0, 0, pack(">HI", *setting))]

    def reset(self, which: int) -> list[bytes]:
        return [frame(RST_STREAM, 0, self._stream(which), bytes(4))]

    def ping(self, is_answer: bool, content: bytes) -> list[bytes]:
        return [frame(PING, ACK if is_answer else 0, 0, content)]

    def priority(self, which: int, payload: bytes) -> list[bytes]:
        return [frame(PRIORITY, 0, self._stream(which), payload)]

    def goaway(self) -> list[bytes]:
        return [frame(GOAWAY, 0, 0, bytes(8))]

    def frame(self, kind: int, flags: int, stream: int, payload: bytes) -> list[bytes]:
        return [frame(kind, flags, stream, payload)]

    def _stream(self, which: int) -> int:
        """A stream that is open, as far as the client knows; sometimes any."""
        begun = [number for number in self._used if number in self._model.streams or number > self._model.last]
        among = begun if begun and which else self._used
        return among[-1 - which % len(among)]


class Both:
    """A connection and the model, which get the same frames and the same calls of an application."""

    def __init__(self) -> None:
        self.wire = Wire(LIMITS, b"")
        self.wire.sent()
        self.model = Http2Model(LIMITS)
        self._unread: list[bytes] = [PREFACE]

    def client_sends(self, frames: list[bytes]) -> None:
        self._unread += frames

    def read(self, cuts: list[int]) -> None:
        """Read what the client has sent, cut at these places."""
        raw = b"".join(self._unread)
        places = [0, *sorted(cut % (len(raw) + 1) for cut in cuts), len(raw)]
        told = self.wire.receive(*[raw[start:end] for start, end in pairwise(places)])
        for each in self._unread:
            if each != PREFACE:
                self.model.receive(Frame(each[3], each[4], int.from_bytes(each[5:9], "big"), each[9:]))
        self._unread = []
        self.compare(told)

    def compare(self, told: list[tuple[object, ...]]) -> None:
        expected, self.model.events = self.model.events, []
        assert without_pieces(told) == without_pieces(expected)
        sent, self.model.out.sent[:] = list(self.model.out.sent), []
        assert [without_text(each) for each in self.wire.sent()] == sent
        connection = self.wire.connection
        assert list(connection.table.open) == list(self.model.streams)
        assert connection.table.unsent_bytes == sum(len(each.unsent) for each in self.model.streams.values())
        assert (connection.is_failed, connection.is_left) == (self.model.is_failed, self.model.is_left)

    def application(self, name: str, *arguments: object) -> None:
        """Call both, for one of the open streams if the step needs one."""
        told: list[tuple[object, ...]] = []
        match name:
            case "room":
                self.model.out.room = float(arguments[0])  # type: ignore[arg-type]  # a number
                self.model.events += self.model.out.write_waiting()
                told = self.wire.write(float(arguments[0]))  # type: ignore[arg-type]  # as above
            case "send_away" | "shut_down" | "send_final_goaway":
                getattr(self.model, name)()
                getattr(self.wire.connection, name)()
            case _ if self.model.streams:
                self._stream_call(name, *arguments)
        self.compare(told)

    def _stream_call(self, name: str, which: int, size: int = 0) -> None:
        number = list(self.model.streams)[which % len(self.model.streams)]
        plain, connection, stream = self.model.out, self.wire.connection, self.wire.stream(number)
        if plain.streams[number].trailers is not None:
            return  # The application has finished.
        content = bytes(index % 253 for index in range(size))
        calls: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
            "respond": (lambda: plain.respond(number), lambda: connection.out.respond(stream, b"head")),
            "send": (
                lambda: plain.respond_data(number, content),
                lambda: connection.out.send(stream, [content[:5], content[5:]], size),
            ),
            "finish": (lambda: plain.finish(number), lambda: connection.out.finish(stream, b"trailers")),
            "answer": (
                lambda: plain.answer(number, content),
                lambda: connection.out.answer(stream, b"head", [content], size, b"trailers"),
            ),
            "use": (lambda: plain.use(number, size), lambda: connection.credit.use(stream, size)),
            "expect": (lambda: plain.expect(number, size), lambda: connection.credit.expect(stream, size)),
            "cancel": (lambda: plain.reset(number, H2Code.CANCEL), lambda: connection.out.reset(stream, H2Code.CANCEL)),
        }
        if name == "answer" and plain.streams[number].unsent:
            return  # An answer is the whole one.
        for call in calls[name]:
            call()


def without_pieces(events: list[tuple[object, ...]]) -> list[tuple[object, ...]]:
    """Events with the DATA of a stream in one, and without texts. Of a frame that breaks a rule, pieces are left out."""
    found: list[tuple[object, ...]] = []
    for event in events:
        match event, found[-1] if found else ():
            case ("data", stream, data, size, is_end), ("data", same, before, sizes, _) if stream == same:
                found[-1] = ("data", stream, before + data, sizes + size, is_end)
            case ("reset", stream, fault), ("data", same, *_) if fault and stream == same:
                found[-1] = ("reset", stream, True)
            case ("reset", stream, fault), _:
                found.append(("reset", stream, bool(fault)))
            case _:
                found.append(event)
    return found


def without_text(sent: Frame) -> Frame:
    return Frame(sent.kind, sent.flags, sent.stream, sent.payload[:8]) if sent.kind == GOAWAY else sent


@settings(max_examples=examples(300))
@given(drawn(play, 240))
def test_a_connection_does_what_the_model_does(case: Play) -> None:
    steps, cuts, is_answered, greeting = case
    both = Both()
    client = Client(both.model)
    # The first request puts a field into the dynamic table, which blocks of later ones use.
    both.client_sends([greeting, *client.begin(PLAIN + ADDED, False, 0)])
    if is_answered:
        both.read(cuts)
        both.application("respond", 0)
        both.application("send", 0, 20)
    names = {name for name in dir(Client) if not name.startswith("_")}
    for name, *arguments in steps:
        if name in names:
            both.client_sends(client.frames(name, *arguments))
        else:
            both.read(cuts)
            both.application(name, *arguments)
    both.read(cuts)
