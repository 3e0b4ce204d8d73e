"""Messages of calls as they were before compression."""

from halimede.core.types import Buffer
from halimede.core.types.error import clip, internal, invalid, unsupported
from halimede.core.wire.grpc_call import DEFLATE, ENCODINGS, GZIP, IDENTITY
from halimede.core.wire.grpc_coding import decode_steps
from halimede.core.wire.grpc_messages import Message
from halimede.core.wire.protocol import ProtoClass, ProtoMessage, parse
from halimede.core.wire.steps import Steps, run
from halimede.frontends.grpc.call import Call


def open_steps(call: Call, message: Message) -> Steps[Buffer]:
    """The content of a message, inflated if it is compressed. UNSUPPORTED for an unknown encoding."""
    if not message.is_compressed:
        return message.content
    encoding = call.head.encoding
    if encoding == IDENTITY:
        raise internal("a message is marked as compressed, but grpc-encoding is identity")
    if encoding not in (GZIP, DEFLATE):
        accepted = b", ".join(ENCODINGS).decode()
        name = clip(encoding.decode("utf-8", "replace"))
        raise unsupported(f"grpc-encoding '{name}' is not supported, expected one of {accepted}")
    method = call.method
    return (yield from decode_steps(message.content, encoding, method.max_bytes, method.too_large))


def fail_without_message(call: Call) -> None:
    call.fail(invalid("the call ended before a whole request came"))


def parse_small(call: Call, request: ProtoClass, message: Message) -> ProtoMessage:
    """The message of a call other than inference, whose size is small."""
    content = run(open_steps(call, message))
    return parse(request, content if isinstance(content, (bytes, bytearray)) else bytes(content))
