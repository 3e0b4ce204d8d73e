"""The devices that this server may use. Who found them (the driver, or a list given by tests) is the caller's affair."""

import re
from dataclasses import dataclass

import orjson

from halimede.core.types import Device, DeviceKind, ErrorCode, InferenceError
from halimede.core.types.error import clip

MAX_DEVICES = 1024
MAX_LIST_BYTES = 1 << 20

# A UUID ends up in CUDA_VISIBLE_DEVICES, where a comma would name a second device.
_UUID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]{0,127}")
_CAPABILITY = re.compile(r"([0-9]{1,3})\.([0-9]{1,3})")
_KEYS = ("kind", "index", "uuid", "name", "memory_bytes", "compute_capability")


@dataclass(frozen=True, slots=True)
class Inventory:
    """Devices in the order in which they were found; indexes and UUIDs are unique."""

    devices: tuple[Device, ...] = ()

    def by_index(self, index: int) -> Device | None:
        """The device that `instance_group.gpus` calls by this number."""
        return next((device for device in self.devices if device.index == index), None)

    def by_uuid(self, uuid: str) -> Device | None:
        """The device that the driver calls by this UUID."""
        return next((device for device in self.devices if device.uuid == uuid), None)


def parse_device_list(text: str | bytes) -> Inventory:
    """The inventory that a JSON list describes; InferenceError INVALID_ARG names every problem, `; ` between them.

    An entry is `{"kind": "GPU" | "MIG", "index": 0, "uuid": "GPU-…"}` and may have `"name"`, `"memory_bytes"` and
    `"compute_capability"` (`"9.0"`).
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
    return InferenceError(ErrorCode.INVALID_ARG, "invalid device list: " + "; ".join(problems))


def _parse_device(entry: object, where: str, problems: list[str]) -> Device | None:
    """The device, or None after adding to `problems`."""
    if not isinstance(entry, dict):
        problems.append(f"{where}: it must be a JSON object")
        return None
    before = len(problems)
    unknown = [key for key in entry if key not in _KEYS]
    problems.extend(f"{where}: unknown key '{clip(key)}', expected one of {', '.join(_KEYS)}" for key in unknown)

    kind = entry.get("kind")
    if kind not in ("GPU", "MIG"):
        problems.append(f"{where}: 'kind' must be \"GPU\" or \"MIG\"")
    index = entry.get("index")
    if type(index) is not int or not 0 <= index < 2**31:
        problems.append(f"{where}: 'index' must be an integer from 0 to {2**31 - 1}")
    uuid = entry.get("uuid")
    if not isinstance(uuid, str) or _UUID.fullmatch(uuid) is None:
        problems.append(f"{where}: 'uuid' must be a string of letters, digits, '-', '_', '.' and '/'")
    name = entry.get("name", "")
    if not isinstance(name, str) or len(name) > 256:
        problems.append(f"{where}: 'name' must be a string of at most 256 characters")
    memory = entry.get("memory_bytes", 0)
    if type(memory) is not int or memory < 0:
        problems.append(f"{where}: 'memory_bytes' must be an integer of at least 0")
    capability = entry.get("compute_capability", "0.0")
    match = _CAPABILITY.fullmatch(capability) if isinstance(capability, str) else None
    if match is None:
        problems.append(f"{where}: 'compute_capability' must be a string like \"9.0\"")

    if match is None or len(problems) > before:
        return None
    return Device(DeviceKind(kind), index, uuid, name, memory, (int(match[1]), int(match[2])))
