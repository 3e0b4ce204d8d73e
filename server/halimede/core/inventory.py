"""The devices that this server may use. The caller gets them from the driver, or from a list that tests give."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import orjson

from halimede.core.types import Device, DeviceKind, InferenceError
from halimede.core.types.error import clip, invalid

MAX_DEVICES = 1024
MAX_LIST_BYTES = 1 << 20

# A UUID ends up in CUDA_VISIBLE_DEVICES, where a comma would name a second device.
_UUID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]{0,127}")
_KIND = re.compile("|".join(kind.value for kind in DeviceKind))
_NAME = re.compile(r"[^\x00-\x1f\x7f]{0,256}")
_CAPABILITY = re.compile(r"[0-9]{1,3}\.[0-9]{1,3}")
_PROFILE = re.compile(r"(?:[0-9]{1,2}c\.)?[0-9]{1,2}g\.[0-9]{1,4}gb(?:[+-][a-z]{1,8}(?:\.[a-z]{1,8}){0,4})?")
_KEYS = ("kind", "index", "uuid", "name", "memory_bytes", "compute_capability", "profile")


@dataclass(frozen=True, slots=True)
class Inventory:
    """Devices in the order in which they were found; indexes and UUIDs are unique."""

    devices: tuple[Device, ...] = ()

    def by_index(self, index: int) -> Device | None:
        """The device with this number in `instance_group.gpus`; None if no device has it."""
        return next((device for device in self.devices if device.index == index), None)


def parse_device_list(text: str | bytes) -> Inventory:
    """The inventory in a JSON list; InferenceError INVALID_ARG lists every problem, separated by `; `.

    An entry is `{"kind": "GPU" | "MIG", "index": 0, "uuid": "GPU-…"}` and may have `"name"`, `"memory_bytes"`,
    `"compute_capability"` (`"9.0"`) and `"profile"` (`"1g.10gb"`).
    """
    if len(text) > MAX_LIST_BYTES:
        raise _invalid([f"it is larger than {MAX_LIST_BYTES} bytes"])
    try:
        entries = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise _invalid([f"it is not JSON: {error}"]) from None
    if not isinstance(entries, list):
        raise _invalid(["it must be a JSON list of devices"])
    if len(entries) > MAX_DEVICES:
        raise _invalid([f"it has {len(entries)} devices, at most {MAX_DEVICES} are allowed"])

    problems: list[str] = []
    devices: list[Device] = []
    for position, entry in enumerate(entries):
        device = _parse_device(entry, f"device {position}", problems)
        if device is None:
            continue
        for other in devices:
            if other.index == device.index:
                problems.append(f"device {position}: 'index' {device.index} is given to another device too")
            if other.uuid == device.uuid:
                problems.append(f"device {position}: 'uuid' {device.uuid} is given to another device too")
        devices.append(device)
    if problems:
        raise _invalid(problems)
    return Inventory(tuple(devices))


def _invalid(problems: list[str]) -> InferenceError:
    return invalid("invalid device list: " + "; ".join(problems))


def _parse_device(entry: object, where: str, problems: list[str]) -> Device | None:
    """The device, or None after adding to `problems`."""
    if not isinstance(entry, dict):
        problems.append(f"{where}: it must be a JSON object")
        return None
    before = len(problems)
    unknown = [key for key in entry if key not in _KEYS]
    problems.extend(f"{where}: unknown key '{clip(key)}', expected one of {', '.join(_KEYS)}" for key in unknown)

    kind = _text(entry, "kind", _KIND, '"GPU" or "MIG"', where, problems)
    index = _integer(entry, "index", 2**31 - 1, where, problems)
    uuid = _text(entry, "uuid", _UUID, "letters, digits, '-', '_', '.' and '/'", where, problems)
    filled = {"name": "", "memory_bytes": 0, "compute_capability": "0.0", **entry}
    name = _text(filled, "name", _NAME, "one line of at most 256 characters", where, problems)
    memory_bytes = _integer(filled, "memory_bytes", 2**63 - 1, where, problems)
    capability = _text(filled, "compute_capability", _CAPABILITY, 'like "9.0"', where, problems)
    profile = _text(entry, "profile", _PROFILE, 'like "1g.10gb"', where, problems) if "profile" in entry else ""
    if len(problems) > before:
        return None
    major, minor = capability.split(".")
    return Device(DeviceKind(kind), index, uuid, name, memory_bytes, (int(major), int(minor)), profile)


def profile_in_name(name: str) -> str:
    """The MIG profile at the end of a slice's name (`NVIDIA H100 80GB HBM3 MIG 1g.10gb`); "" if it has none."""
    profile = name.rpartition(" MIG ")[2].strip() if " MIG " in name else ""
    return profile if _PROFILE.fullmatch(profile) else ""


def profile_of_sizes(gpu_slices: int, compute_slices: int, memory_mib: int, gpu_memory_bytes: int) -> str:
    """The MIG profile of a slice by its sizes, as NVIDIA's tools name it; "" without sizes.

    The profile has the memory in eighths of the GPU's, so its number differs from the memory of the slice.
    """
    if not (gpu_slices and compute_slices and memory_mib and gpu_memory_bytes):
        return ""
    eighths = math.ceil(memory_mib * 2**20 * 8 / gpu_memory_bytes)
    gigabytes = round(eighths / 8 * math.ceil(gpu_memory_bytes / 2**30))
    compute = "" if compute_slices == gpu_slices else f"{compute_slices}c."
    return f"{compute}{gpu_slices}g.{gigabytes}gb"


def _text(
    entry: Mapping[str, object], key: str, pattern: re.Pattern[str], rule: str, where: str, problems: list[str]
) -> str:
    value = entry.get(key)
    if isinstance(value, str) and pattern.fullmatch(value):
        return value
    problems.append(f"{where}: '{key}' must be a string: {rule}")
    return ""


def _integer(entry: Mapping[str, object], key: str, most: int, where: str, problems: list[str]) -> int:
    value = entry.get(key)
    # In Python, JSON's `true` is an int.
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most:
        return value
    problems.append(f"{where}: '{key}' must be an integer from 0 to {most}")
    return 0
