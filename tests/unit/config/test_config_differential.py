"""The server's reader of the text format compared with the protocol's, on forty configurations and edits of them.

There are two references: text_format of the Python runtime, and protoc, whose C++ parser is Triton's. Where they differ
the server follows C++ (`test_config_read` lists those cases). ON_PURPOSE has the reasons for differences from C++.
"""

import random
import re

import pytest
from hypothesis import HealthCheck, given, settings

from halimede.core.config.message_types import message_type
from halimede.core.config.model_config import ModelConfig
from halimede.core.config.read import read_pbtxt, read_yaml
from halimede.core.config.write import to_yaml
from support.config_seeds import SEEDS
from support.configs import (
    EDITS_BYTES,
    PIECES,
    Protoc,
    edited,
    edits_of,
    has_nameless_enum,
    new,
    parsed_by_text_format,
    serialized,
    to_proto,
)
from support.examples import drawn, examples

ON_PURPOSE = {
    "an enum number must have a name: other numbers have no meaning": has_nameless_enum,
}
"""Why the server refuses a text that C++ accepts, and whether the reason applies to the message from C++."""

TOKENS = re.compile(rb'[A-Za-z0-9_.]+|"[^"\n]*"|\s+|.', re.DOTALL)


@pytest.mark.parametrize("name", SEEDS)
def test_every_seed_is_read_as_by_triton_s_parser(protoc, name):
    parsed = read_pbtxt(SEEDS[name])
    assert parsed.problems == ()
    assert serialized(to_proto(parsed.config, new())) == serialized(new().FromString(protoc.encoded(SEEDS[name])))


def test_seeds_contain_every_field_of_every_message():
    missing = set(field_paths(ModelConfig, ""))
    for seed in SEEDS.values():
        missing -= {re.sub(r'\[("[^"]*"|\d+)\]', "", path) for path in read_pbtxt(seed).locations}
    assert (len(SEEDS), missing) == (40, set())


@pytest.mark.parametrize("count", [2_000, pytest.param(100_000, marks=[pytest.mark.load, pytest.mark.timeout(1800)])])
def test_edited_seeds_are_read_as_by_the_protocol_s_parsers(protoc, count):
    source, seeds = random.Random(count), list(SEEDS.values())
    accepted = sum(is_read_alike(protoc, mutated(source, seeds)) for _ in range(count))
    # Enough of them are still configurations for their values to be compared.
    assert accepted > count // 20


@settings(max_examples=examples(500), deadline=None, suppress_health_check=list(HealthCheck))
@given(case=drawn(lambda draws: (draws.pick(sorted(SEEDS.values())), edits_of(draws)), EDITS_BYTES))
def test_seeds_with_any_edits_are_read_as_by_the_protocol_s_parsers(protoc, case):
    is_read_alike(protoc, edited(*case))


@pytest.mark.parametrize("count", [1_000, pytest.param(50_000, marks=[pytest.mark.load, pytest.mark.timeout(1800)])])
def test_edited_yaml_is_read_or_has_problems_with_places(count):
    source = random.Random(count)
    seeds = ["\n".join(line.text for line in to_yaml(read_pbtxt(seed).config)).encode() for seed in SEEDS.values()]
    read = 0
    for _ in range(count):
        parsed = read_yaml(mutated(source, seeds))
        assert all(problem.line >= 1 and problem.column >= 1 for problem in parsed.problems)
        read += not parsed.problems
    assert count // 20 < read < count


def is_read_alike(protoc, text):
    """Assert that the server reads the text as the protocol does; return whether it is accepted."""
    parsed = read_pbtxt(text)
    assert all(problem.line >= 1 and problem.column >= 1 for problem in parsed.problems), text
    own = None if parsed.problems else serialized(to_proto(parsed.config, new()))
    message = parsed_by_text_format(text)
    reference = None if message is None else serialized(message)
    if own != reference:
        encoded = protoc.encoded(text)
        message = None if encoded is None else new().FromString(encoded)
        reference = None if message is None else serialized(message)
    is_on_purpose = own is None and message is not None and any(holds(message) for holds in ON_PURPOSE.values())
    assert own == reference or is_on_purpose, (text, parsed.problems)
    return own is not None


def mutated(source, seeds):
    """One of the seeds with one to three edits, of bytes or of tokens; of the latter most leave the grammar alone."""
    text = source.choice(seeds)
    for _ in range(source.randint(1, 3)):
        if source.random() < 0.3:
            piece = source.choice([*PIECES, source.random()])
            text = edited(text, [(source.random(), source.choice([0, 0, 0, 1, 1, 2, 7]), piece)])
        else:
            text = with_token(source, text, source.choice(seeds))
    return text


def with_token(source, text, other):
    """The text with a token removed, doubled, or replaced by one of the other text."""
    tokens = TOKENS.findall(text) or [b""]
    at = source.randrange(len(tokens))
    tokens[at] = source.choice([b"", tokens[at] * 2, source.choice(TOKENS.findall(other) or [b""])])
    return b"".join(tokens)


def field_paths(message, path):
    for field in message_type(message).by_name.values():
        at = f"{path}.{field.name}" if path else field.name
        yield at
        if field.value.message is not None:
            yield from field_paths(field.value.message, at)


@pytest.fixture(scope="module")
def protoc(tmp_path_factory):
    judge = Protoc(tmp_path_factory.mktemp("protoc"))
    yield judge
    judge.close()
