import pytest

from halimede.core.inventory import (
    MAX_DEVICES,
    MAX_LIST_BYTES,
    Inventory,
    parse_device_list,
    profile_in_name,
    profile_of_sizes,
)
from halimede.core.types import Device, DeviceKind, ErrorCode
from support.refusals import error_of


def problem_of(text: str | bytes) -> str:
    error = error_of(parse_device_list, text)
    assert error.code is ErrorCode.INVALID_ARG
    return error.message


def test_a_device_list_becomes_an_inventory():
    inventory = parse_device_list(
        """[
          {"kind": "GPU", "index": 0, "uuid": "GPU-11", "name": "NVIDIA H200", "memory_bytes": 150000000000,
           "compute_capability": "9.0"},
          {"kind": "MIG", "index": 4, "uuid": "MIG-22", "profile": "1g.10gb+me"}
        ]"""
    )

    whole = Device(DeviceKind.GPU, 0, "GPU-11", "NVIDIA H200", 150_000_000_000, (9, 0))
    slice_ = Device(DeviceKind.MIG, 4, "MIG-22", profile="1g.10gb+me")
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
          {"kind": "GPU", "index": 0, "uuid": "GPU-1", "memory_bytes": -1, "compute_capability": "nine", "name": 3,
           "profile": "1g"},
          {"kind": "GPU", "index": 1, "uuid": "GPU-3"},
          {"kind": "GPU", "index": 1, "uuid": "GPU-3"}
        ]"""
    ) == "invalid device list: " + "; ".join(
        [
            "device 0: it must be a JSON object",
            "device 1: unknown key 'colour', expected one of kind, index, uuid, name, memory_bytes, compute_capability, "
            "profile",
            'device 1: \'kind\' must be a string: "GPU" or "MIG"',
            "device 1: 'index' must be an integer from 0 to 2147483647",
            "device 1: 'uuid' must be a string: letters, digits, '-', '_', '.' and '/'",
            "device 2: 'name' must be a string: one line of at most 256 characters",
            "device 2: 'memory_bytes' must be an integer from 0 to 9223372036854775807",
            "device 2: 'compute_capability' must be a string: like \"9.0\"",
            "device 2: 'profile' must be a string: like \"1g.10gb\"",
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


@pytest.mark.parametrize(
    ("name", "profile"),
    [
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "1g.5gb"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb+me", "1g.10gb+me"),
        ("NVIDIA A100-SXM4-80GB MIG 1c.3g.40gb", "1c.3g.40gb"),
        ("NVIDIA RTX PRO 6000 MIG 1g.24gb-me", "1g.24gb-me"),
        ("NVIDIA H100 80GB HBM3", ""),
        ("NVIDIA H100 MIG", ""),
        ("A MIG 1g", ""),
    ],
)
def test_profile_is_at_the_end_of_the_name_of_a_slice(name: str, profile: str):
    assert profile_in_name(name) == profile


@pytest.mark.parametrize(
    ("sizes", "gpu_mib", "profile"),
    [
        ((1, 1, 4864), 40960, "1g.5gb"),
        ((7, 7, 40192), 40960, "7g.40gb"),
        ((1, 1, 9856), 81559, "1g.10gb"),
        ((1, 1, 19968), 81559, "1g.20gb"),
        ((3, 1, 40192), 81559, "1c.3g.40gb"),
        ((1, 1, 11008), 95830, "1g.12gb"),
        ((0, 0, 0), 81559, ""),
    ],
)
def test_profile_follows_from_the_sizes_of_a_slice(sizes: tuple[int, int, int], gpu_mib: int, profile: str):
    assert profile_of_sizes(*sizes, gpu_mib << 20) == profile
