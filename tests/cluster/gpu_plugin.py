"""A simulated GPU device plugin: `python -m cluster.gpu_plugin SOCKET FOLDER LIBRARY`, one in each node.

The kubelet uses it like NVIDIA's device plugin. Commands set the devices, their health and their memory in use. A
container gets NVIDIA's variable and a driver library without GPUs, which shows its devices alone.
"""

import shutil
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]  # the package has no types
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from cluster.commands import listen
from support.played_driver import DEVICES_FILE, PlayedGpu, PlayedSlice, write_devices

SOCKETS = Path("/var/lib/kubelet/device-plugins")
KUBELET = SOCKETS / "kubelet.sock"
VERSION = "v1beta1"
DRIVER_IN_CONTAINER = Path("/run/driver")
STREAMS = 32

# The part of the kubelet's API that is used here: messages, and their fields by name, number and type.
STRING, BOOL = FieldDescriptorProto.TYPE_STRING, FieldDescriptorProto.TYPE_BOOL
MESSAGES: dict[str, dict[str, tuple[int, int | str]]] = {
    "Empty": {},
    "RegisterRequest": {"version": (1, STRING), "endpoint": (2, STRING), "resource_name": (3, STRING)},
    "DevicePluginOptions": {"pre_start_required": (1, BOOL)},
    "Device": {"ID": (1, STRING), "health": (2, STRING)},
    "ListAndWatchResponse": {"devices": (1, "Device")},
    "ContainerAllocateRequest": {"devices_ids": (1, "STRINGS")},
    "AllocateRequest": {"container_requests": (1, "ContainerAllocateRequest")},
    # A map is a list of pairs.
    "Variable": {"key": (1, STRING), "value": (2, STRING)},
    "Mount": {"container_path": (1, STRING), "host_path": (2, STRING), "read_only": (3, BOOL)},
    "ContainerAllocateResponse": {"envs": (1, "Variable"), "mounts": (2, "Mount")},
    "AllocateResponse": {"container_responses": (1, "ContainerAllocateResponse")},
}


def message_classes() -> dict[str, Any]:
    """One class per message, by its name."""
    file = FileDescriptorProto(name="plugin.proto", package=VERSION, syntax="proto3")
    for name, fields in MESSAGES.items():
        message = DescriptorProto(name=name)
        for field_name, (number, kind) in fields.items():
            field = message.field.add(name=field_name, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL)
            if isinstance(kind, int):
                field.type = kind  # type: ignore[assignment]  # an enum's value
                continue
            field.label = FieldDescriptorProto.LABEL_REPEATED
            field.type = STRING if kind == "STRINGS" else FieldDescriptorProto.TYPE_MESSAGE
            if kind != "STRINGS":
                field.type_name = f".{VERSION}.{kind}"
        file.message_type.append(message)
    pool = DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"{VERSION}.{name}")) for name in MESSAGES}


M = message_classes()


class Plugin:
    """The devices of one resource, `{id: entry of a device list}`, offered to the kubelet under its name."""

    def __init__(self, resource: str, drivers: Path, library: Path) -> None:
        self.resource = resource
        self._drivers = drivers
        self._library = library
        self._given: set[tuple[str, ...]] = set()
        self._devices: dict[str, Any] = {}
        self._changed = threading.Condition()
        self._stopped = False
        self._server = grpc.server(ThreadPoolExecutor(STREAMS))
        handlers = {
            "GetDevicePluginOptions": _unary("Empty", self._say_options),
            "ListAndWatch": grpc.unary_stream_rpc_method_handler(
                self._watch, M["Empty"].FromString, M["ListAndWatchResponse"].SerializeToString
            ),
            "Allocate": _unary("AllocateRequest", self._allocate),
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(f"{VERSION}.DevicePlugin", handlers),)
        )
        self._socket = SOCKETS / f"{resource.replace('/', '-')}-{time.monotonic_ns()}.sock"
        self._server.add_insecure_port(f"unix:{self._socket}")
        self._server.start()

    def offer(self, devices: dict[str, Any]) -> None:
        with self._changed:
            self._devices = devices
            for ids in self._given:
                self._show(ids)
            self._changed.notify_all()

    def register(self) -> None:
        request = M["RegisterRequest"](version=VERSION, endpoint=self._socket.name, resource_name=self.resource)
        with grpc.insecure_channel(f"unix:{KUBELET}") as channel:
            call = channel.unary_unary(
                f"/{VERSION}.Registration/Register", M["RegisterRequest"].SerializeToString, M["Empty"].FromString
            )
            call(request, timeout=10, wait_for_ready=True)

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._server.stop(grace=None).wait()

    def _say_options(self, request: Any, context: grpc.ServicerContext) -> Any:
        return M["DevicePluginOptions"]()

    def _watch(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        reported: dict[str, Any] | None = None
        while context.is_active() and not self._stopped:
            with self._changed:
                devices = self._devices
                if devices == reported:
                    self._changed.wait(timeout=1)
                    continue
            reported = devices
            yield M["ListAndWatchResponse"](
                devices=[M["Device"](ID=name, health=device["health"]) for name, device in devices.items()]
            )

    def _allocate(self, request: Any, context: grpc.ServicerContext) -> Any:
        return M["AllocateResponse"](
            container_responses=[self._give(list(container.devices_ids)) for container in request.container_requests]
        )

    def _give(self, ids: list[str]) -> Any:
        folder = self._show(tuple(ids))
        shutil.copy(self._library, folder)
        self._given.add(tuple(ids))
        variables = {
            "NVIDIA_VISIBLE_DEVICES": ",".join(ids),
            "LD_LIBRARY_PATH": str(DRIVER_IN_CONTAINER),
            "PLAYED_DEVICES": str(DRIVER_IN_CONTAINER / DEVICES_FILE),
        }
        return M["ContainerAllocateResponse"](
            envs=[M["Variable"](key=key, value=value) for key, value in variables.items()],
            mounts=[M["Mount"](container_path=str(DRIVER_IN_CONTAINER), host_path=str(folder), read_only=True)],
        )

    def _show(self, ids: tuple[str, ...]) -> Path:
        """The folder of a container's driver, which shows these devices, as far as they still exist."""
        folder = self._drivers / "_".join(ids)
        folder.mkdir(exist_ok=True)
        lines: list[PlayedGpu | PlayedSlice] = []
        for number, device in enumerate(self._devices[name] for name in ids if name in self._devices):
            total, used = device["memory_bytes"] >> 20, device.get("used_mib", 0)
            if device["kind"] == "MIG":
                lines.append(PlayedGpu(f"GPU-{number}", total, mig="1", capability=device["compute_capability"]))
                lines.append(PlayedSlice(device["uuid"], total, used, device["name"]))
            else:
                capability = device["compute_capability"]
                lines.append(PlayedGpu(device["uuid"], total, used, device["name"], capability=capability))
        write_devices(folder / DEVICES_FILE, lines)
        return folder


def _unary(request: str, answer: Any) -> grpc.RpcMethodHandler:
    return grpc.unary_unary_rpc_method_handler(answer, M[request].FromString, lambda reply: reply.SerializeToString())


class Driver:
    """All resources of a node. Orders and the passing of time lead to the same: what is offered becomes what is wanted,
    and a kubelet that has just started, which has no plugin and removes all sockets, gets the whole list."""

    def __init__(self, drivers: Path, library: Path) -> None:
        self._drivers = drivers
        self._library = library
        self._wanted: dict[str, Any] = {}
        self._plugins: dict[str, Plugin] = {}
        self._kubelet: tuple[int, int] | None = None
        self._lock = threading.Lock()

    def set(self, order: Any, descriptors: list[int]) -> None:
        """`{resource: {id: device}}`; devices that are not listed are removed."""
        self._wanted = order
        self.refresh()

    def refresh(self) -> None:
        with self._lock:
            kubelet = _identity(KUBELET)
            for resource in list(self._plugins):
                if kubelet != self._kubelet or resource not in self._wanted:
                    self._plugins.pop(resource).stop()
            self._kubelet = kubelet
            if kubelet is None:
                return
            for resource, devices in self._wanted.items():
                if resource in self._plugins:
                    self._plugins[resource].offer(devices)
                    continue
                plugin = Plugin(resource, self._drivers, self._library)
                plugin.offer(devices)
                try:
                    plugin.register()
                except grpc.RpcError:
                    # The kubelet may know it nevertheless, and would keep its devices beside those of the next attempt.
                    plugin.stop()
                    raise
                self._plugins[resource] = plugin


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_ctime_ns


def main() -> None:
    drivers, library = map(Path, sys.argv[2:])
    drivers.mkdir(exist_ok=True)
    driver = Driver(drivers, library)
    listen(Path(sys.argv[1]), driver.set)
    while True:
        try:
            driver.refresh()
        except grpc.RpcError as error:
            print(f"the kubelet cannot be reached yet: {error}", flush=True)
        time.sleep(0.2)


if __name__ == "__main__":
    main()
