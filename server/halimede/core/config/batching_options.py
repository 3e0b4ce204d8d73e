"""The model parameters of the dynamic batcher. Errors are INVALID_ARG and name the parameter."""

from collections.abc import Sequence

from halimede.core.config.model_config import ModelConfig
from halimede.core.config.process_options import number
from halimede.core.types import Problem
from halimede.core.types.error import clip, invalid

PRIORITY_AGING_MICROSECONDS = "PRIORITY_AGING_MICROSECONDS"
BATCHING_STRATEGY = "BATCHING_STRATEGY"
TRITON_BATCH_STRATEGY_PATH = "TRITON_BATCH_STRATEGY_PATH"
STRATEGY_GROUP = "halimede.batching_strategies"
"""The group of entry points that are batching strategies."""

MOST_MICROSECONDS = 2**53 - 1
# A move costs about 10 us on the event loop, and a request moves at most once for each level.
LEAST_AGING_MICROSECONDS = 1000
MOST_AGING_LEVELS = 100


def priority_aging_us(config: ModelConfig) -> int:
    """How long a request waits in a priority level before it moves to the next higher one; 0 for ever."""
    return number(config, PRIORITY_AGING_MICROSECONDS, MOST_MICROSECONDS, 0, LEAST_AGING_MICROSECONDS)


def batching_strategy_name(config: ModelConfig) -> str:
    """The entry point of the batching strategy; "" for none, and for a model without a dynamic batcher."""
    parameter = config.parameters.get(BATCHING_STRATEGY)
    return parameter.string_value if parameter is not None and config.dynamic_batching is not None else ""


def check_batching_options(config: ModelConfig, libraries: Sequence[str]) -> tuple[Problem, ...]:
    """Read the options, and note those without effect. `libraries` are files that Triton would load as strategies."""
    notes = []
    batching = config.dynamic_batching
    if priority_aging_us(config) and batching is not None and batching.priority_levels > MOST_AGING_LEVELS:
        raise invalid(
            f"model '{clip(config.name)}': with parameter '{PRIORITY_AGING_MICROSECONDS}' a model has at most "
            f"{MOST_AGING_LEVELS} priority levels, got {batching.priority_levels}"
        )
    if PRIORITY_AGING_MICROSECONDS in config.parameters and (batching is None or batching.priority_levels <= 1):
        notes.append(_parameter_note(PRIORITY_AGING_MICROSECONDS, "the model has no priority levels to move between"))
    if batching is not None and batching.priority_queue_policy and batching.priority_levels == 0:
        field = "dynamic_batching.priority_queue_policy"
        notes.append(Problem(f"'{field}' has no effect: the model has no priority levels", field))
    if BATCHING_STRATEGY in config.parameters and batching is None:
        notes.append(_parameter_note(BATCHING_STRATEGY, "the model has no dynamic_batching"))
    instead = (
        f"C libraries of batching strategies are not loaded; name an installed Python class (entry point group "
        f"'{STRATEGY_GROUP}') in parameter '{BATCHING_STRATEGY}'"
    )
    if TRITON_BATCH_STRATEGY_PATH in config.parameters:
        notes.append(_parameter_note(TRITON_BATCH_STRATEGY_PATH, instead))
    elif libraries:
        notes.append(Problem(f"'{clip(libraries[0])}' has no effect: {instead}"))
    return tuple(notes)


def _parameter_note(name: str, why: str) -> Problem:
    return Problem(f"parameter '{name}' has no effect: {why}", f'parameters["{name}"]')
