"""What a model may add to its configuration, and the helpers that read a configuration."""

import json
import re

import pytest

from halimede.backends.python.utils.config import (
    ModelConfig,
    get_input_config_by_name,
    get_output_config_by_name,
    using_decoupled_model_transaction_policy,
)

FP32 = {"data_type": "TYPE_FP32", "dims": [4]}


def config(**fields) -> ModelConfig:
    return ModelConfig(json.dumps({"name": "m", "max_batch_size": 4, "input": [], "output": [], **fields}))


def test_unset_values_are_filled_in():
    made = config(input=[{"name": "A", "data_type": "TYPE_INVALID", "dims": [], "optional": False}])
    made.set_max_batch_size(8)
    made.add_input({"name": "A", **FP32})
    made.add_input({"name": "B", "optional": True, **FP32})
    made.add_output({"name": "C", **FP32})
    made.set_dynamic_batching()
    made.set_model_transaction_policy({"decoupled": True})
    assert made.as_dict() == {
        "name": "m",
        "max_batch_size": 8,
        "input": [{"name": "A", "optional": False, **FP32}, {"name": "B", "optional": True, **FP32}],
        "output": [{"name": "C", **FP32}],
        "dynamic_batching": {},
        "model_transaction_policy": {"decoupled": True},
    }


def test_configured_values_may_be_repeated():
    made = config(
        output=[{"name": "C", **FP32}], dynamic_batching={"x": 1}, model_transaction_policy={"decoupled": False}
    )
    before = json.dumps(made.as_dict())
    made.add_output({"name": "C", **FP32})
    made.set_dynamic_batching()
    made.set_max_batch_size(4)
    made.set_model_transaction_policy({"decoupled": False})
    made.set_model_transaction_policy({})
    assert json.dumps(made.as_dict()) == before


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda c: c.set_max_batch_size(2),
            "configuration specified max_batch_size 4, but in auto-complete-config function for model 'm' specified"
            " max_batch_size 2",
        ),
        (
            lambda c: c.add_input({"name": "A", "shape": [1], **FP32}),
            "input 'A' in auto-complete-config function for model 'm' contains property other than 'name', 'data_type',"
            " 'dims' and 'optional'.",
        ),
        (
            lambda c: c.add_output({"name": "A", "optional": True, **FP32}),
            "output 'A' in auto-complete-config function for model 'm' contains property other than 'name', 'data_type'"
            " and 'dims'.",
        ),
        (lambda c: c.add_input({}), "input in auto-complete-config function for model 'm' is missing 'name' property."),
        (
            lambda c: c.add_input({"name": "A", "dims": [1]}),
            "input 'A' in auto-complete-config function for model 'm' is missing 'data_type' property.",
        ),
        (
            lambda c: c.add_output({"name": "A", "data_type": "TYPE_FP32"}),
            "output 'A' in auto-complete-config function for model 'm' is missing 'dims' property.",
        ),
        (
            lambda c: c.add_input({"name": "X", "data_type": "TYPE_INT8", "dims": [4]}),
            "unable to load model 'm', configuration expects datatype TYPE_FP32 for input 'X', model provides TYPE_INT8",
        ),
        (
            lambda c: c.add_output({"name": "Y", "data_type": "TYPE_FP32", "dims": [5]}),
            "model 'm', tensor 'Y': the model expects dims [5] but the model configuration specifies dims [4]",
        ),
        (
            lambda c: c.add_input({"name": "X", "optional": True, **FP32}),
            "model 'm', tensor 'X': the model expects optional True but the model configuration specifies optional False",
        ),
        (
            lambda c: c.set_model_transaction_policy({"decoupled": True, "x": 1}),
            "model transaction property in auto-complete-config function for model 'm' contains property other than"
            " 'decoupled'.",
        ),
        (
            lambda c: c.set_model_transaction_policy({"decoupled": False}),
            "trying to change decoupled property in auto-complete-config for model 'm', which is already set to 'True'.",
        ),
        (
            lambda c: c.set_dynamic_batching(),
            "Configuration specified scheduling_choice as 'sequence_batching', but auto-complete-config function for"
            " model 'm' tries to set scheduling_choice as 'dynamic_batching'",
        ),
    ],
)
def test_contradiction_of_the_configuration_is_refused(change, text):
    made = config(
        input=[{"name": "X", "optional": False, **FP32}],
        output=[{"name": "Y", **FP32}],
        sequence_batching={},
        model_transaction_policy={"decoupled": True},
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        change(made)


def test_the_helpers_find_tensors_and_the_policy():
    whole = {"input": [{"name": "A"}], "output": [{"name": "B"}], "model_transaction_policy": {"decoupled": True}}
    assert get_input_config_by_name(whole, "A") == {"name": "A"}
    assert get_input_config_by_name(whole, "B") is None
    assert get_output_config_by_name(whole, "B") == {"name": "B"}
    assert get_output_config_by_name({}, "B") is None
    assert using_decoupled_model_transaction_policy(whole)
    assert not using_decoupled_model_transaction_policy({})
