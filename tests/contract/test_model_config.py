"""The operator knows the fields of a model configuration: by the table in halimede_spec, written from the server's."""

import json
import re
from typing import Any

from hypothesis import given, settings

from halimede.backends.onnxruntime.options import read_options
from halimede.core.config.read import read_json
from halimede_operator.core.spec.field import Field
from halimede_operator.core.spec.model_config import read_model_config
from halimede_spec.config_field import ConfigField
from halimede_spec.config_table import ENUMS, MESSAGES
from support.custom_resources import schema_of
from support.examples import Draws, drawn
from support.spec_tables import REGENERATE, messages

NUMBERS = (0, 1, -1, 7, 2**31 - 1, 2**31, 2**32, -(2**63), 2**63, 2**64 - 1, 8.0, 0.5, 1e300, "12", "-3", "0x1", True)
WRONG: tuple[Any, ...] = ("", "a", [], {}, None, True)
"""Without numbers: the server also takes an enum by its number, and a float as a text."""
PLAIN = {"string": ("", "a", "models"), "bool": (True, False), "float": (0, 0.25, -3)}
KEYS = ("a", "7", "-1", "")


def config_of(draws: Draws) -> dict[str, Any]:
    """A configuration that is mostly valid."""
    return message_of(draws, "ModelConfig")


def message_of(draws: Draws, name: str) -> dict[str, Any]:
    fields = MESSAGES[name]
    if not fields:
        return {}
    return {each: field_of(draws, fields[each]) for each in draws.some(tuple(fields), 3)}


def field_of(draws: Draws, field: ConfigField) -> Any:
    if field.keys:
        return {draws.pick(KEYS): value_of(draws, field.kind) for _ in range(draws.below(3))}
    if field.is_list:
        return [value_of(draws, field.kind) for _ in range(draws.below(3))]
    return value_of(draws, field.kind)


def value_of(draws: Draws, kind: str) -> Any:
    if draws.below(16) == 15:
        return draws.pick(WRONG)
    if kind in MESSAGES:
        return message_of(draws, kind)
    return draws.pick(ENUMS.get(kind) or PLAIN.get(kind) or NUMBERS)


def test_the_table_is_that_of_the_server() -> None:
    assert messages() == (MESSAGES, ENUMS), f"run `{REGENERATE}`"


@settings(max_examples=400)
@given(drawn(config_of, 60))
def test_operator_and_server_refuse_the_same_configurations(config: dict[str, Any]) -> None:
    problems: dict[Any, None] = {}
    left_out = {key: value for key, value in config.items() if key not in ("name", "versionPolicy")}
    read_model_config(Field("config", left_out, problems), has_gpu=True)
    assert bool(problems) == bool(read_json(json.dumps(left_out)).problems)


def test_the_example_of_the_schema_is_one_that_works() -> None:
    described = schema_of("InferenceModel")["properties"]["spec"]["properties"]["model"]["properties"]["config"]
    example = re.search(r"\{maxBatchSize: 8, parameters: \{(\w+): \{stringValue: \"4\"\}\}\}", described["description"])
    assert example is not None
    read = read_json(json.dumps({"maxBatchSize": 8, "parameters": {example[1]: {"stringValue": "4"}}}))
    assert read.problems == ()
    assert read_options(read.config, "bert", on_gpu=False).intra_op_threads == 4
