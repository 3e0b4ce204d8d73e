from collections.abc import Callable

import pytest

from halimede.core.config.model_config import ModelConfig, ModelParameter
from halimede.core.config.process_options import (
    PROCESS,
    THREAD,
    bls_timeout_ms,
    execution_timeout_ms,
    intra_op_threads,
    isolation_of,
    isolation_on_devices,
    max_concurrency,
    spins,
)
from halimede.core.inventory import Inventory
from halimede.core.types import Device, DeviceKind, ErrorCode
from support.refusals import error_of


def config(**parameters: str) -> ModelConfig:
    return ModelConfig(
        name="m", backend="b", parameters={key: ModelParameter(value) for key, value in parameters.items()}
    )


def refusal(call: Callable[[], object]) -> str:
    error = error_of(call)
    assert error.code is ErrorCode.INVALID_ARG
    return error.message


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
def test_isolation_is_the_models_or_the_backends_default(parameters: dict[str, str], of_backend: str, isolation: str):
    assert isolation_of(config(**parameters), of_backend) == isolation


@pytest.mark.parametrize("value", ["", "proces", "1", " process"])
def test_unknown_isolation_is_refused(value: str):
    assert refusal(lambda: isolation_of(config(ISOLATION=value), THREAD)) == (
        f"model 'm': parameter 'ISOLATION' is '{value}'; it must be 'process' or 'thread'"
    )


def test_python_models_cannot_run_in_the_server():
    assert refusal(lambda: isolation_of(config(ISOLATION="thread"), PROCESS)) == (
        "model 'm': parameter 'ISOLATION' is 'thread', and instances of backend 'b' always run in processes of their "
        "own; expected 'process', or none"
    )


def test_without_parameters_batches_have_no_limit_and_run_one_by_one():
    assert (execution_timeout_ms(config()), max_concurrency(config())) == (0, 1)


def test_calls_are_queued_for_five_minutes_by_default():
    assert bls_timeout_ms(config()) == 300_000
    assert [bls_timeout_ms(config(BLS_TIMEOUT_MS=value)) for value in ("0", "1500", "2147483647")] == [
        0,
        1_500,
        2**31 - 1,
    ]


@pytest.mark.parametrize("bad", ["", "-1", "1.5", "00000000000", "never", "2147483648"])
def test_invalid_call_timeout_is_refused(bad: str):
    assert refusal(lambda: bls_timeout_ms(config(BLS_TIMEOUT_MS=bad))) == (
        f"model 'm': parameter 'BLS_TIMEOUT_MS' is '{bad}'; it must be a number from 0 to 2147483647"
    )


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
def test_invalid_number_is_refused_by_name(key: str, read: Callable[[ModelConfig], object], most: int):
    for bad in ("", "0", "-1", "1.5", "1e3", " 1", "+1", "x", "１", str(most + 1), "9" * 5_000):
        text = refusal(lambda bad=bad: read(config(**{key: bad})))
        assert text.startswith(f"model 'm': parameter '{key}' is '{bad[:100]}")
        assert text.endswith(f"it must be a number from 1 to {most}")
        assert len(text) < 500


def test_processes_spin_by_default():
    assert [spins(config(SPIN=value)) for value in ("true", "True", "false", "FALSE")] == [True, True, False, False]
    assert spins(config())
    assert refusal(lambda: spins(config(SPIN="0"))) == (
        "model 'm': parameter 'SPIN' is '0'; it must be 'true' or 'false'"
    )


def inventory(*uuids: str) -> Inventory:
    return Inventory(tuple(Device(DeviceKind(uuid[:3]), index, uuid) for index, uuid in enumerate(uuids)))


@pytest.mark.parametrize(
    ("uuids", "per_device", "isolation", "expected"),
    [
        (("MIG-0",), False, THREAD, THREAD),
        (("MIG-0", "MIG-1"), False, THREAD, PROCESS),
        (("GPU-0", "MIG-1"), False, THREAD, PROCESS),
        (("GPU-0", "GPU-1"), False, THREAD, THREAD),
        (("GPU-0", "GPU-1"), True, THREAD, PROCESS),
        (("GPU-0",), True, THREAD, PROCESS),
        (("MIG-0",), True, THREAD, PROCESS),
        (("GPU-0",), False, PROCESS, PROCESS),
    ],
)
def test_isolation_follows_from_the_devices(uuids: tuple[str, ...], per_device: bool, isolation: str, expected: str):
    assert isolation_on_devices(config(), isolation, inventory(*uuids), process_per_device=per_device) == expected


def test_requested_threads_are_refused_only_if_they_cannot_work():
    asked = config(ISOLATION="thread")
    assert isolation_on_devices(asked, THREAD, inventory("GPU-0", "GPU-1"), process_per_device=True) == THREAD
    slices = inventory("MIG-0", "MIG-1")
    assert refusal(lambda: isolation_on_devices(asked, THREAD, slices, process_per_device=False)) == (
        "model 'm': parameter 'ISOLATION' is 'thread', but a process can use only one MIG slice, and this server has 2 "
        "devices; expected 'process', or none"
    )
