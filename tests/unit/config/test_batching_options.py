"""The model parameters of the dynamic batcher."""

import pytest

from halimede.core.config.batching_options import batching_strategy_name, check_batching_options, priority_aging_us
from halimede.core.config.model_config import ModelConfig, ModelDynamicBatching, ModelParameter, ModelQueuePolicy
from halimede.core.types import ErrorCode, InferenceError
from support.refusals import error_of

LEVELS = ModelDynamicBatching(priority_levels=2, default_priority_level=1)
INSTEAD = (
    "has no effect: C libraries of batching strategies are not loaded; name an installed Python class (entry point "
    "group 'halimede.batching_strategies') in parameter 'BATCHING_STRATEGY'"
)


def config(batching: ModelDynamicBatching | None = None, **parameters: str) -> ModelConfig:
    values = {key: ModelParameter(value) for key, value in parameters.items()}
    return ModelConfig(name="m", parameters=values, dynamic_batching=batching)


def notes(config: ModelConfig, *libraries: str) -> list[str]:
    return [note.message for note in check_batching_options(config, libraries)]


def test_ageing_is_off_unless_it_is_configured():
    assert priority_aging_us(config(LEVELS)) == 0
    aging = config(LEVELS, PRIORITY_AGING_MICROSECONDS="2500")
    assert (priority_aging_us(aging), notes(aging)) == (2500, [])


@pytest.mark.parametrize("value", ["", "0", "-1", "1.5", "soon", "999", "9" * 17])
def test_a_wrong_time_of_ageing_is_refused(value: str):
    assert error_of(check_batching_options, config(LEVELS, PRIORITY_AGING_MICROSECONDS=value), ()) == InferenceError(
        ErrorCode.INVALID_ARG,
        f"model 'm': parameter 'PRIORITY_AGING_MICROSECONDS' is '{value}'; it must be a number from 1000 to 9007199254740991",
    )


def test_ageing_over_very_many_levels_is_refused():
    levels = ModelDynamicBatching(priority_levels=101, default_priority_level=1)
    assert error_of(check_batching_options, config(levels, PRIORITY_AGING_MICROSECONDS="1000"), ()).message == (
        "model 'm': with parameter 'PRIORITY_AGING_MICROSECONDS' a model has at most 100 priority levels, got 101"
    )
    assert notes(config(levels)) == []


@pytest.mark.parametrize("batching", [None, ModelDynamicBatching(), ModelDynamicBatching(priority_levels=1)])
def test_ageing_without_levels_gives_a_note(batching: ModelDynamicBatching | None):
    assert notes(config(batching, PRIORITY_AGING_MICROSECONDS="5000")) == [
        "parameter 'PRIORITY_AGING_MICROSECONDS' has no effect: the model has no priority levels to move between"
    ]


def test_policies_of_levels_without_levels_give_a_note():
    policies = {1: ModelQueuePolicy(max_queue_size=8)}
    config = ModelConfig(name="m", dynamic_batching=ModelDynamicBatching(priority_queue_policy=policies))
    (note,) = check_batching_options(config, ())
    assert note.message == "'dynamic_batching.priority_queue_policy' has no effect: the model has no priority levels"


def test_a_strategy_needs_a_dynamic_batcher():
    assert batching_strategy_name(config(LEVELS, BATCHING_STRATEGY="volume")) == "volume"
    without = config(BATCHING_STRATEGY="volume")
    assert batching_strategy_name(without) == ""
    assert notes(without) == ["parameter 'BATCHING_STRATEGY' has no effect: the model has no dynamic_batching"]


def test_a_native_strategy_gives_one_note_that_names_what_to_use():
    named = config(LEVELS, TRITON_BATCH_STRATEGY_PATH="/models/m/b.so")
    assert notes(named, "/models/m/batchstrategy.so") == [f"parameter 'TRITON_BATCH_STRATEGY_PATH' {INSTEAD}"]
    assert notes(config(LEVELS), "/m/1/batchstrategy.so", "/m/batchstrategy.so") == [
        f"'/m/1/batchstrategy.so' {INSTEAD}"
    ]
    assert notes(config(LEVELS)) == []
