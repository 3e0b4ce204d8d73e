"""Properties of any `generate` body: valid or a client's error, with the same result in slices as at once."""

import json
from collections.abc import Callable

from hypothesis import HealthCheck, example, given, settings

from halimede.core.config.model_config import ModelConfig, ModelInput
from halimede.core.config.model_view import ModelView
from halimede.core.types import DataType, ErrorCode, InferenceError, InferenceRequest
from halimede.core.wire.generate import decode_large_steps, decode_small
from halimede.core.wire.steps import run
from support.examples import Draws, drawn, examples

INPUTS = {"f": DataType.FP32, "i": DataType.INT8, "u": DataType.UINT64, "b": DataType.BOOL, "s": DataType.BYTES}
CONFIG = ModelConfig(name="m", input=tuple(ModelInput(name, datatype, dims=(-1,)) for name, datatype in INPUTS.items()))
VIEW = ModelView("m", "1", ("1",), CONFIG, {})

many = settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])

SCALARS = (
    *("0", "1", "-1", "1.5", "1e400", "300", "18446744073709551615", "true", "false", "null", "NaN", "Infinity"),
    *("-Infinity", '""', '"a"', '"],[{,"', r'"\""', r'"\\"', '"é"', r'"\ud83d"', "{}", "x", '{"a":[1]}', "[[1]]"),
    *(
        '"' + "long " * 20 + '"',
        '"' + r"\\\"" * 20 + '"',
        '"NaN"',
        " " * 60 + "7",
        "[0]",
        "[ ]",
        "[" + " " * 60 + "]",
    ),
)
NAMES = ("f", "i", "u", "b", "s", "k", "id", "n" * 50)
VALUES: dict[str, Callable[[Draws], str]] = {
    "any": lambda draws: draws.pick(SCALARS),
    "f": lambda draws: json.dumps(draws.float(32)),
    "i": lambda draws: str(draws.integer(-128, 127)),
    "u": lambda draws: str(draws.integer(0, 2**64 - 1)),
    "b": lambda draws: draws.pick(("true", "false")),
    "s": lambda draws: json.dumps(draws.text(12)),
}


def member_of(draws: Draws) -> str:
    kind = draws.pick(tuple(VALUES))
    name = draws.pick(NAMES) if kind == "any" else kind
    values = [VALUES[kind](draws) for _ in range(draws.pick((0, 1, 1, 2, 3, 6)))]
    gap = draws.pick(("", " ", " " * 70, "\n"))
    value = values[0] if len(values) == 1 and draws.below(2) else f"[{(',' + gap).join(values)}]"
    return f'"{name}":{gap}{value}'


def members_of(draws: Draws, most: int) -> list[str]:
    return [member_of(draws) for _ in range(draws.below(most + 1))]


def body_of(draws: Draws) -> bytes:
    outer = members_of(draws, 4)
    if draws.below(2):
        outer.insert(draws.below(len(outer) + 1), f'"parameters":{{{",".join(members_of(draws, 3))}}}')
    body = bytearray(f"{{{', '.join(outer)}}}".encode())
    for _ in range(draws.pick((0, 0, 0, 1, 2))):
        at = draws.below(len(body))
        body[at : at + draws.below(2)] = draws.pick((b"", *map(bytes, zip(b'[]{},"\\:1 a\xff'))))
    return bytes(body)


def result_of(decode: Callable[[], InferenceRequest]) -> object:
    try:
        request = decode()
    except InferenceError as error:
        return error.code if len(error.message) < 4096 else "too long a text"
    tensors = [(tensor.name, tensor.datatype, tensor.shape, bytes(tensor.data)) for tensor in request.inputs]
    return tensors, request.id, request.parameters


@many
@given(drawn(lambda draws: (draws.pick((16, 17, 31, 64, 4096)), body_of(draws)), 400))
@example((16, b'{"f":NaN,"s":"' + b"x" * 40 + b'","parameters":{"i":[1,2]}}'))
@example((16, b'{"parameters":{"i":[0]},"s":["a","b"]}'))
@example((16, b'{"s":[],"i":[1,[2,3]]}'))
@example((16, b'{"' + b"k" * 40 + b'":"' + b'\\"' * 20 + b'"}'))
@example((16, b'{"a":[1}]}'))
@example((16, b'{"a":]1[}'))
@example((16, b'{"u":[,],"u":[]}'))
def test_slices_of_any_size_give_the_same_result(case: tuple[int, bytes]) -> None:
    block_bytes, body = case
    at_once = result_of(lambda: decode_small(VIEW, body))
    assert result_of(lambda: run(decode_large_steps(VIEW, body, block_bytes=block_bytes))) == at_once
    assert at_once is ErrorCode.INVALID_ARG or isinstance(at_once, tuple)


@many
@given(drawn(body_of, 400))
def test_a_whole_body_is_refused_or_valid_json(body: bytes) -> None:
    """Only bodies that a plain parser accepts are accepted."""
    if result_of(lambda: decode_small(VIEW, body)) is ErrorCode.INVALID_ARG:
        return
    assert isinstance(json.loads(body), dict)
