from collections.abc import Callable

import pytest

from halimede.core.config.model_config import ModelConfig, ModelParameter
from halimede.core.config.process_options import (
    PROCESS,
    THREAD,
    execution_timeout_ms,
    intra_op_threads,
    isolation_of,
    max_concurrency,
)
from halimede.core.types import ErrorCode, InferenceError


def config(**parameters: str) -> ModelConfig:
    return ModelConfig(
        name="m", backend="b", parameters={key: ModelParameter(value) for key, value in parameters.items()}
    )


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(InferenceError) as caught:
        call()
    assert caught.value.code is ErrorCode.INVALID_ARG
    return caught.value.message


@pytest.mark.parametrize(
    ("parameters", "of_backend", "isolation"),
    [
        ({}, THREAD, THREAD),
        ({}, PROCESS, PROCESS),
        ({"ISOLATION": "process"}, THREAD, PROCESS),
        ({"ISOLATION": "PROCESS"}, THREAD, PROCESS),
        ({"ISOLATION": "thread"}, THREAD, THREAD),
        ({"ISOLATION": "process"}, PROCESS, PROCESS),
    ],
)
def test_instances_run_where_the_model_says_or_else_where_its_backend_has_them(
    parameters: dict[str, str], of_backend: str, isolation: str
):
    assert isolation_of(config(**parameters), of_backend) == isolation


@pytest.mark.parametrize("value", ["", "proces", "1", " process"])
def test_an_isolation_that_is_neither_is_refused(value: str):
    assert refusal(lambda: isolation_of(config(ISOLATION=value), THREAD)) == (
        f"model 'm': parameter 'ISOLATION' is '{value}'; it must be 'process' or 'thread'"
    )


def test_python_models_cannot_be_had_into_the_server():
    assert refusal(lambda: isolation_of(config(ISOLATION="thread"), PROCESS)) == (
        "model 'm': parameter 'ISOLATION' is 'thread', and instances of backend 'b' always run in processes of their "
        "own; right is 'process', or none"
    )


def test_without_parameters_batches_have_no_limit_and_run_one_by_one():
    assert (execution_timeout_ms(config()), max_concurrency(config())) == (0, 1)


def test_parameters_are_read_as_numbers():
    given = config(EXECUTION_TIMEOUT_MS="2147483647", MAX_CONCURRENCY="64", INTRA_OP_THREAD_COUNT="1024")
    assert execution_timeout_ms(given) == 2**31 - 1
    assert max_concurrency(given) == 64
    assert intra_op_threads(given, cpus=2, instances=8) == 1024


@pytest.mark.parametrize(
    ("cpus", "instances", "threads"), [(8, 1, 8), (8, 2, 4), (8, 3, 2), (2, 4, 1), (1, 1, 1), (4, 0, 4)]
)
def test_instances_share_the_processors(cpus: int, instances: int, threads: int):
    assert intra_op_threads(config(), cpus, instances) == threads


@pytest.mark.parametrize(
    ("key", "read", "most"),
    [
        ("EXECUTION_TIMEOUT_MS", execution_timeout_ms, 2**31 - 1),
        ("MAX_CONCURRENCY", max_concurrency, 64),
        ("INTRA_OP_THREAD_COUNT", lambda config: intra_op_threads(config, 2, 1), 1024),
    ],
)
def test_what_is_no_number_in_range_is_refused_by_name(key: str, read: Callable[[ModelConfig], object], most: int):
    for bad in ("", "0", "-1", "1.5", "1e3", " 1", "+1", "x", "１", str(most + 1), "9" * 5_000):
        text = refusal(lambda bad=bad: read(config(**{key: bad})))
        assert text.startswith(f"model 'm': parameter '{key}' is '{bad[:100]}")
        assert text.endswith(f"it must be a number from 1 to {most}")
        assert len(text) < 500
