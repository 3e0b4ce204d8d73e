"""The origin of each value of a configuration, and how it is printed."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings

from halimede.core.config.defaults import apply_defaults
from halimede.core.config.explain import Stage, explained, origins
from halimede.core.config.model_config import (
    InstanceKind,
    ModelConfig,
    ModelDynamicBatching,
    ModelInput,
    ModelInstanceGroup,
    ModelParameter,
)
from halimede.core.config.read import read_pbtxt, read_yaml
from halimede.core.config.write import to_pbtxt, to_yaml
from halimede.core.types import DataType
from support.configs import CONFIGURATION_BYTES, configuration
from support.examples import drawn, examples

TEXT = """\
name: "m"
max_batch_size: 8
input { name: "x" }
dynamic_batching { preserve_ordering: false }
parameters { key: "a" value { string_value: "no" } }
instance_group { count: 2 }
"""


def stages_of(text):
    """The stages of a file, of a backend that fills in the tensors, and of the defaults."""
    parsed = read_pbtxt(text)
    found = replace(
        parsed.config,
        input=(ModelInput("x", DataType.FP32, dims=(3, -1)),),
        dynamic_batching=parsed.config.dynamic_batching or ModelDynamicBatching(),
    )
    complete = replace(
        apply_defaults(found, "m"),
        instance_group=(ModelInstanceGroup("m_0", InstanceKind.KIND_CPU, 2),),
    )
    stages = [Stage("config.pbtxt", parsed.config), Stage("model file", found), Stage("default", complete)]
    return stages, parsed.locations


def test_value_is_attributed_to_the_step_that_set_it():
    stages, locations = stages_of(TEXT)
    found = origins(stages, locations)
    assert {path: found[path] for path in found if path in SOME} == SOME


SOME = {
    "name": "config.pbtxt:1",
    "max_batch_size": "config.pbtxt:2",
    "input[0]": "config.pbtxt:3",
    "input[0].name": "config.pbtxt:3",
    "input[0].data_type": "model file",
    "input[0].dims": "model file",
    "version_policy": "default",
    "version_policy.latest.num_versions": "default",
    "dynamic_batching": "config.pbtxt:4",
    "dynamic_batching.preserve_ordering": "config.pbtxt:4",
    "dynamic_batching.priority_levels": "default",
    "dynamic_batching.preferred_batch_size": "default",
    'parameters["a"].string_value': "config.pbtxt:5",
    "instance_group[0].count": "config.pbtxt:6",
    "instance_group[0].kind": "default",
}


def test_replaced_value_is_attributed_to_the_later_step():
    file, changed = ModelConfig(max_batch_size=0), ModelConfig(max_batch_size=4)
    found = origins([Stage("config.pbtxt", file), Stage("model file", changed)], {"max_batch_size": (3, 1)})
    assert found["max_batch_size"] == "model file"


def test_restored_value_is_attributed_to_the_restoring_step():
    one, other = ModelConfig(parameters={"a": ModelParameter("1")}), ModelConfig()
    found = origins([Stage("file", one), Stage("between", other), Stage("last", one)], {'parameters["a"]': (1, 1)})
    assert found['parameters["a"].string_value'] == "last"


def test_the_explained_text_of_both_formats():
    stages, locations = stages_of(TEXT)
    config = replace(stages[-1].config, optimization=None, version_policy=None)
    found = origins(stages, locations)
    assert explained(to_pbtxt(config, locations), found) == [
        'name: "m"                      # config.pbtxt:1',
        "max_batch_size: 8              # config.pbtxt:2",
        "input {",
        '  name: "x"                    # config.pbtxt:3',
        "  data_type: TYPE_FP32         # model file",
        "  dims: [ 3, -1 ]              # model file",
        "}",
        "dynamic_batching {             # config.pbtxt:4",
        "  preferred_batch_size: [ 8 ]  # default",
        "  preserve_ordering: false     # config.pbtxt:4",
        "}",
        "instance_group {",
        '  name: "m_0"                  # default',
        "  kind: KIND_CPU               # default",
        "  count: 2                     # config.pbtxt:6",
        "}",
        "parameters {",
        '  key: "a"',
        "  value {",
        '    string_value: "no"         # config.pbtxt:5',
        "  }",
        "}",
    ]
    assert explained(to_yaml(config, locations), found) == [
        'name: "m"                    # config.pbtxt:1',
        "max_batch_size: 8            # config.pbtxt:2",
        "input:",
        '  - name: "x"                # config.pbtxt:3',
        "    data_type: TYPE_FP32     # model file",
        "    dims: [3, -1]            # model file",
        "dynamic_batching:            # config.pbtxt:4",
        "  preferred_batch_size: [8]  # default",
        "  preserve_ordering: false   # config.pbtxt:4",
        "instance_group:",
        '  - name: "m_0"              # default',
        "    kind: KIND_CPU           # default",
        "    count: 2                 # config.pbtxt:6",
        "parameters:",
        '  "a":',
        '    string_value: "no"       # config.pbtxt:5',
    ]


def test_one_long_line_does_not_move_other_comments():
    config = ModelConfig(name="m", platform="p" * 200)
    name, platform = explained(to_pbtxt(config), {"name": "default", "platform": "default"})
    assert (name, platform) == ('name: "m"  # default', f'platform: "{"p" * 200}"  # default')


@pytest.mark.parametrize(
    "text", ["", '"', "\\", "\n", "\x00", "\x7f", "\x85", "é", "\u2028", "\ufeff", "😀", "#", "a: b", "no"]
)
def test_any_text_is_quoted_so_that_it_is_read_back(text):
    config = ModelConfig(name="m", parameters={text: ModelParameter(text)})
    for lines, read in ((to_yaml(config), read_yaml), (to_pbtxt(config), read_pbtxt)):
        assert read("\n".join(line.text for line in lines)).config == config


@settings(max_examples=examples(100), deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn(lambda draws: (configuration(draws), configuration(draws)), 2 * CONFIGURATION_BYTES))
def test_explained_text_parses_and_all_values_have_origins(stages):
    file, complete = stages
    found = origins([Stage("file", file), Stage("default", complete)], {})
    for lines, read in ((to_yaml(complete), read_yaml), (to_pbtxt(complete), read_pbtxt)):
        parsed = read("\n".join(explained(lines, found)))
        assert (parsed.problems, parsed.config) == ((), complete)
