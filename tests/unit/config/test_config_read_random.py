"""Random and edited configurations: our readers agree with the protocol's own writers and readers.

The references are text_format and json_format of the Python runtime, and protoc, whose C++ parser is the one in Triton.
`test_config_differential` continues from there.
"""

import re

import pytest
from google.protobuf import json_format, text_format
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halimede.core.config.read import read_json, read_pbtxt
from halimede.core.config.write import to_json
from support.configs import (
    CONFIGURATION_BYTES,
    EDITS_BYTES,
    Protoc,
    configuration,
    edited,
    edits_of,
    new,
    parsed_by_text_format,
    serialized,
    to_proto,
)
from support.examples import drawn, examples
from support.written_configs import ENSEMBLE, SEQUENCES, VISION


@settings(max_examples=examples(100), deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn(lambda draws: (draws.raw(1)[0], configuration(draws)), CONFIGURATION_BYTES))
def test_output_of_the_text_format_printer_is_read_back(case):
    style, config = case
    text = text_format.MessageToString(
        to_proto(config, new()),
        as_utf8=bool(style & 1),
        as_one_line=bool(style & 2),
        use_short_repeated_primitives=bool(style & 4),
        pointy_brackets=bool(style & 8),
    )
    parsed = read_pbtxt(text)
    assert (parsed.problems, parsed.config) == ((), config)


@settings(max_examples=examples(100), deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn(lambda draws: (draws.raw(1)[0], configuration(draws)), CONFIGURATION_BYTES))
def test_json_output_is_read_back_in_both_directions(case):
    style, config = case
    message = to_proto(config, new())
    text = json_format.MessageToJson(
        message,
        preserving_proto_field_name=bool(style & 1),
        always_print_fields_with_no_presence=bool(style & 2),
        use_integers_for_enums=bool(style & 4),
    )
    own = to_json(config)
    for parsed in (read_json(text), read_json(own)):
        assert (parsed.problems, parsed.config) == ((), config)
    assert json_format.Parse(own, new()) == message


SEEDS = [
    VISION.encode(),
    SEQUENCES.encode(),
    ENSEMBLE.encode(),
    b'name: "a\\n" max_batch_size: -0x1F',
    b"version_policy { latest { num_versions: 017 } }",
    b"sequence_batching { direct < minimum_slot_utilization: 1.5e-3f > }",
    b"input [ { dims: [ 1, 2 ] data_type: 3 }, < optional: t > ];",
    b'metric_tags [ { key: "a", value: \'b\' "c" } ], # end',
    b"model_warmup { inputs { key: 'k' value { zero_data: true } } }",
]
JSON_SEEDS = [to_json(read_pbtxt(seed).config) for seed in SEEDS]


@pytest.mark.parametrize(
    "text",
    [
        b"max_batch_size: - 1",
        b"max_batch_size: -#\n1",
        b"max_batch_size: +1",
        b"max_batch_size: 1_0",
        b"max_batch_size: 0b1",
        b"max_batch_size: 0o1",
        b"response_cache { enable: 01 }",
        b"optimization { priority: 01 }",
        b"sequence_batching { direct { minimum_slot_utilization: inff } }",
        b"sequence_batching { direct { minimum_slot_utilization: 1ff } }",
        b"name: '\\q'",
        b"name: '\\400'",
        b"name: '\\ud83d\\ude00'",
        b"name: 'x\0'",
        b"# \0",
        b"# \xff",
        b"name\xc2\xa0: 'x'",
    ],
)
def test_parser_follows_the_cpp_parser(protoc, text):
    accepted = not read_pbtxt(text).problems
    assert (accepted, parsed_by_text_format(text) is None) == (protoc.encoded(text) is not None, accepted)


@settings(max_examples=examples(500), deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn(lambda draws: (draws.pick(JSON_SEEDS), edits_of(draws)), EDITS_BYTES))
def test_edited_json_is_accepted_only_where_the_protocol_accepts_it(case):
    text = edited(*case)
    parsed = read_json(text)
    if not parsed.problems:
        assert serialized(to_proto(parsed.config, new())) == serialized(parse_json(text))


def parse_json(text):
    try:
        return json_format.Parse(text, new())
    except json_format.ParseError:
        # Protobuf's C++ does not mind the case of enum names, its Python does.
        if isinstance(text, bytes):
            text = text.decode()
        names = r"(?i)\b((type|kind|format|priority|batch|control)_\w+|reject|delay)\b(?!\"\s*:)"
        return json_format.Parse(re.sub(names, lambda m: m[0].upper(), text), new())


@settings(max_examples=examples(300), deadline=None)
@given(st.binary(max_size=60) | st.text(max_size=60) | st.text(alphabet=st.characters(categories=["Cs"]), max_size=3))
def test_no_text_raises_an_exception(text):
    for parsed in (read_pbtxt(text), read_json(text)):
        assert isinstance(to_json(parsed.config), bytes)
        assert all(problem.line >= 1 and problem.column >= 1 for problem in parsed.problems)


@pytest.fixture(scope="module")
def protoc(tmp_path_factory):
    judge = Protoc(tmp_path_factory.mktemp("protoc"))
    yield judge
    judge.close()


def test_json_takes_enum_names_in_any_case() -> None:
    text = (
        '{"input": [{"name": "x", "data_type": "TYPE_uINT64", "dims": ["1"]}],'
        ' "sequence_batching": {"control_input": [{"name": "c", "control": [{"kind": "control_SEQUENCE_END"}]}]}}'
    )
    for form in (text, text.encode()):
        assert serialized(to_proto(read_json(form).config, new())) == serialized(parse_json(form))
