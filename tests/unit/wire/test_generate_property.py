"""Properties of any `generate` body: valid or a client's error, with the same result in slices as at once."""

import json
from collections.abc import Callable

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from halimede.core.config.model_config import ModelConfig, ModelInput
from halimede.core.config.model_view import ModelView
from halimede.core.types import DataType, ErrorCode, InferenceError, InferenceRequest
from halimede.core.wire.generate import decode_large_steps, decode_small
from halimede.core.wire.steps import run
from support.examples import examples

INPUTS = {"f": DataType.FP32, "i": DataType.INT8, "u": DataType.UINT64, "b": DataType.BOOL, "s": DataType.BYTES}
CONFIG = ModelConfig(name="m", input=tuple(ModelInput(name, datatype, dims=(-1,)) for name, datatype in INPUTS.items()))
VIEW = ModelView("m", "1", ("1",), CONFIG, {})

many = settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])

scalars = st.sampled_from(
    [
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
    ]
)
names = st.sampled_from(["f", "i", "u", "b", "s", "k", "id", "n" * 50])


@st.composite
def members(draw: st.DrawFn) -> str:
    kind = draw(st.sampled_from(["any", "f", "i", "u", "b", "s"]))
    fitting = {
        "any": scalars,
        "f": st.floats(width=32).map(json.dumps),
        "i": st.integers(-128, 127).map(str),
        "u": st.integers(0, 2**64 - 1).map(str),
        "b": st.sampled_from(["true", "false"]),
        "s": st.text(max_size=60).map(json.dumps),
    }[kind]
    name = draw(names) if kind == "any" else kind
    values = draw(st.lists(fitting, max_size=6))
    gap = draw(st.sampled_from(["", " ", " " * 70, "\n"]))
    value = values[0] if len(values) == 1 and draw(st.booleans()) else f"[{(',' + gap).join(values)}]"
    return f'"{name}":{gap}{value}'


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    outer = draw(st.lists(members(), max_size=4))
    if draw(st.booleans()):
        outer.insert(
            draw(st.integers(0, len(outer))), f'"parameters":{{{",".join(draw(st.lists(members(), max_size=3)))}}}'
        )
    body = bytearray(f"{{{', '.join(outer)}}}".encode())
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        at = draw(st.integers(0, len(body) - 1))
        body[at : at + draw(st.integers(0, 1))] = draw(st.sampled_from([b"", *map(bytes, zip(b'[]{},"\\:1 a\xff'))]))
    return bytes(body)


def result_of(decode: Callable[[], InferenceRequest]) -> object:
    try:
        request = decode()
    except InferenceError as error:
        return error.code if len(error.message) < 4096 else "too long a text"
    tensors = [(tensor.name, tensor.datatype, tensor.shape, bytes(tensor.data)) for tensor in request.inputs]
    return tensors, request.id, request.parameters


@many
@given(bodies(), st.sampled_from([16, 17, 31, 64, 4096]))
@example(b'{"f":NaN,"s":"' + b"x" * 40 + b'","parameters":{"i":[1,2]}}', 16)
@example(b'{"parameters":{"i":[0]},"s":["a","b"]}', 16)
@example(b'{"s":[],"i":[1,[2,3]]}', 16)
@example(b'{"' + b"k" * 40 + b'":"' + b'\\"' * 20 + b'"}', 16)
@example(b'{"a":[1}]}', 16)
@example(b'{"a":]1[}', 16)
@example(b'{"u":[,],"u":[]}', 16)
def test_slices_of_any_size_give_the_same_result(body: bytes, block_bytes: int) -> None:
    at_once = result_of(lambda: decode_small(VIEW, body))
    assert result_of(lambda: run(decode_large_steps(VIEW, body, block_bytes=block_bytes))) == at_once
    assert at_once is ErrorCode.INVALID_ARG or isinstance(at_once, tuple)


@many
@given(bodies())
def test_a_whole_body_is_refused_or_valid_json(body: bytes) -> None:
    """Only bodies that a plain parser accepts are accepted."""
    if result_of(lambda: decode_small(VIEW, body)) is ErrorCode.INVALID_ARG:
        return
    assert isinstance(json.loads(body), dict)
