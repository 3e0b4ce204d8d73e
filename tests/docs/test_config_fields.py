"""The described schema, from which the reference pages of the documentation are generated."""

from dataclasses import fields

from config_fields import MEANINGS, FieldDescription, descriptions

from halimede.core.config.model_config import ModelConfig
from halimede.core.config.support import TABLE, Treatment


def field(message: str, name: str) -> FieldDescription:
    return next(f for m in descriptions() if m.name == message for f in m.fields if f.name == name)


def test_every_field_of_every_message_has_a_meaning():
    assert {message: set(rules) for message, rules in MEANINGS.items()} == {
        message: {each.name for each in fields(message)} for message in TABLE
    }


def test_a_meaning_is_one_short_line_of_words():
    for message, meanings in MEANINGS.items():
        for name, meaning in meanings.items():
            assert 10 <= len(meaning) <= 100, (message, name)
            assert meaning.endswith("."), (message, name)
            assert "\n" not in meaning, (message, name)


def test_every_message_is_described_once_and_the_configuration_first():
    names = [message.name for message in descriptions()]
    assert sorted(names) == sorted(message.__name__ for message in TABLE)
    assert names[:3] == ["ModelConfig", "ModelVersionPolicy", "LatestVersions"]
    assert [f.name for f in descriptions()[0].fields] == [f.name for f in fields(ModelConfig)]


def test_types_defaults_and_treatments_are_those_of_the_code():
    assert field("ModelInput", "dims").type == "list of int64"
    assert field("ModelDynamicBatching", "priority_queue_policy").type == "map of uint64 to ModelQueuePolicy"
    assert field("ModelDynamicBatching", "priority_queue_policy").message == "ModelQueuePolicy"
    assert field("ModelInstanceGroup", "kind").values == ("KIND_AUTO", "KIND_GPU", "KIND_CPU", "KIND_MODEL")
    assert field("ModelInput", "data_type").default == "TYPE_INVALID"
    assert field("ModelVersionPolicy", "all").oneof == ("latest", "all", "specific")
    assert [field("ModelConfig", name).default for name in ("name", "max_batch_size", "input", "parameters")] == [
        '""',
        "0",
        "[]",
        "{}",
    ]
    assert (field("WarmupInput", "zero_data").type, field("WarmupInput", "zero_data").default) == ("bool", "unset")
    assert field("RateLimiterResource", "global").type == "bool"
    priority = field("ModelOptimizationPolicy", "priority")
    assert (priority.treatment, priority.why) == (Treatment.NO_EFFECT, "all models run at the same priority")
