"""What a server reports of real devices. Skipped where there is none."""

from pathlib import Path
from typing import Any

from halimede.core.types import DeviceKind
from support.gpus import DEVICES, needs_gpu_or_slice
from support.served import add_python
from support.server import start_server, wait_until

MIB = 1 << 20

pytestmark = needs_gpu_or_slice

# CUDA's driver interface, because no library for GPUs may be installed.
TAKE_512_MIB = """
def initialize(self, args):
    cuda = ctypes.CDLL("libcuda.so.1")
    context, memory = ctypes.c_void_p(), ctypes.c_uint64()
    assert cuda.cuInit(0) == 0
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert cuda.cuCtxSetCurrent(context) == 0
    assert cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(512 << 20)) == 0
"""


def test_devices_have_the_memory_that_a_load_took(tmp_path: Path) -> None:
    add_python(tmp_path / "models", "taker", methods=TAKE_512_MIB)
    config = tmp_path / "models" / "taker" / "config.pbtxt"
    config.write_text(config.read_text().replace("kind: KIND_CPU", "kind: KIND_GPU"))
    server = start_server(tmp_path, ["--model-repository", tmp_path / "models"])

    def report() -> list[Any]:
        return server.get("/v2/halimede/devices").json["devices"]  # type: ignore[index,no-any-return]

    def all_grew() -> bool:
        return all(each["memory_peak_bytes"] - each["memory_before_bytes"] >= 512 * MIB for each in report())

    try:
        wait_until(all_grew, "a sample after the load", server)
        listed = report()
    finally:
        server.kill()
    assert [(each["uuid"], each["kind"]) for each in listed] == [(each.uuid, each.kind.value) for each in DEVICES]
    for device, found in zip(DEVICES, listed, strict=True):
        assert found["memory_total_bytes"] > found["memory_peak_bytes"] >= found["memory_used_bytes"]
        assert found["instances"] == [{"model": "taker", "version": "1", "count": 1}]
        assert (found.get("profile", "") != "") == (device.kind is DeviceKind.MIG)
