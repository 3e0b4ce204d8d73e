import pytest

from halimede.core.inventory import MAX_DEVICES, MAX_LIST_BYTES, Inventory, parse_device_list
from halimede.core.types import Device, DeviceKind, ErrorCode, InferenceError


def problem_of(text: str | bytes) -> str:
    with pytest.raises(InferenceError) as raised:
        parse_device_list(text)
    assert raised.value.code is ErrorCode.INVALID_ARG
    return raised.value.message


def test_a_device_list_becomes_an_inventory():
    inventory = parse_device_list(
        """[
          {"kind": "GPU", "index": 0, "uuid": "GPU-11", "name": "NVIDIA H200", "memory_bytes": 150000000000,
           "compute_capability": "9.0"},
          {"kind": "MIG", "index": 4, "uuid": "MIG-22"}
        ]"""
    )

    whole = Device(DeviceKind.GPU, 0, "GPU-11", "NVIDIA H200", 150_000_000_000, (9, 0))
    slice_ = Device(DeviceKind.MIG, 4, "MIG-22")
    assert inventory == Inventory((whole, slice_))
    assert inventory.by_index(4) == slice_
    assert inventory.by_index(1) is None


def test_an_empty_list_is_a_machine_without_devices():
    assert parse_device_list("[]") == Inventory()


def test_every_problem_of_a_list_is_named():
    assert problem_of(
        """[
          7,
          {"kind": "TPU", "index": true, "uuid": "GPU-1,GPU-2", "colour": "red"},
          {"kind": "GPU", "index": 0, "uuid": "GPU-1", "memory_bytes": -1, "compute_capability": "nine", "name": 3},
          {"kind": "GPU", "index": 1, "uuid": "GPU-3"},
          {"kind": "GPU", "index": 1, "uuid": "GPU-3"}
        ]"""
    ) == "invalid device list: " + "; ".join(
        [
            "device 0: it must be a JSON object",
            "device 1: unknown key 'colour', expected one of kind, index, uuid, name, memory_bytes, compute_capability",
            'device 1: \'kind\' must be a string: "GPU" or "MIG"',
            "device 1: 'index' must be an integer from 0 to 2147483647",
            "device 1: 'uuid' must be a string: letters, digits, '-', '_', '.' and '/'",
            "device 2: 'name' must be a string: one line of at most 256 characters",
            "device 2: 'memory_bytes' must be an integer from 0 to 9223372036854775807",
            "device 2: 'compute_capability' must be a string: like \"9.0\"",
            "device 4: 'index' 1 is given to another device too",
            "device 4: 'uuid' GPU-3 is given to another device too",
        ]
    )


def test_a_required_key_that_is_missing_is_named():
    assert problem_of('[{"kind": "GPU", "index": 0}]') == (
        "invalid device list: device 0: 'uuid' must be a string: letters, digits, '-', '_', '.' and '/'"
    )


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, b"\xff", "[1e999]"])
def test_list_that_is_not_json_is_refused(text: str | bytes):
    assert problem_of(text).startswith("invalid device list: it is not JSON: ")


def test_document_that_is_not_a_list_or_too_large_is_refused():
    assert problem_of("{}") == "invalid device list: it must be a JSON list of devices"
    assert problem_of("[" + "0," * MAX_DEVICES + "0]") == (
        "invalid device list: it has 1025 devices, at most 1024 are allowed"
    )
    assert problem_of(" " * (MAX_LIST_BYTES + 1)) == "invalid device list: it is larger than 1048576 bytes"
