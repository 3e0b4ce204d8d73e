"""Servers in real containers with little memory, and clients that send them more at once than fits.

The kernel kills processes of a container that is full, and the server may be the first. So a request that there is no
memory for is refused, and every other one is answered.
"""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from support.memory_group import joining, memory_group, oom_kills
from support.models import add_onnx_identity
from support.served import add_python
from support.server import RunningServer, start_server

MIB = 1 << 20
MB = 1_000_000

# Outputs in new memory of the model.
COPY = """
arrays = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array.copy())]) for array in arrays]
"""
SERVED, REFUSED = "served", "refused for lack of room"
ROOM = (
    "the server holds as many bytes of request",
    "does not fit into the",
    "too little free memory",
    "Exceeds maximum queue size",
)


@contextmanager
def server_in(group: Path, folder: Path, model: str, *arguments: str) -> Iterator[RunningServer]:
    """A server with all its processes in the group. It is no fork, whose memory would be another process's."""
    repository = folder / "models"
    repository.mkdir()
    if model == "python":
        add_python(repository, "m", COPY)
    else:
        add_onnx_identity(repository, "m", "FP32", ["rows", "n"])
    server = start_server(folder, ["--model-repository", repository, *arguments], forked=False, first=joining(group))
    try:
        yield server
    finally:
        server.kill()


def infer(server: RunningServer, module: Any, array: np.ndarray) -> str:
    """Send one request on a connection of its own, and return how it ended."""
    url = server.http_url if module is tritonclient.http else server.grpc_url
    tensor = module.InferInput("IN", array.shape, "FP32")
    tensor.set_data_from_numpy(array)
    with module.InferenceServerClient(url) as client:
        try:
            got = client.infer("m", [tensor]).as_numpy("OUT")
        except InferenceServerException as error:
            return REFUSED if any(text in error.message() for text in ROOM) else str(error)
    return SERVED if np.array_equal(got, array) else "a wrong answer"


def send_at_once(server: RunningServer, module: Any, clients: int, size_bytes: int) -> Counter[str]:
    array = np.arange(size_bytes // 4, dtype=np.float32)[None]
    with ThreadPoolExecutor(clients) as pool:
        return Counter(pool.map(lambda _: infer(server, module, array), range(clients)))


@pytest.mark.parametrize(("module", "model"), [(tritonclient.http, "python"), (tritonclient.grpc, "onnx")])
def test_a_small_container_serves_what_fits_and_refuses_the_rest(tmp_path: Path, module: Any, model: str):
    with memory_group(256 * MIB) as group, server_in(group, tmp_path, model) as server:
        for _ in range(2):
            outcomes = send_at_once(server, module, 4, 30 * MB)
            assert set(outcomes) <= {SERVED, REFUSED}, (outcomes, server.log)
            assert outcomes[SERVED], server.log
        assert (server.process.poll(), oom_kills(group)) == (None, 0), server.log


LOADS = ((4, 60 * MB), (16, 30 * MB), (4, 8 * MB), (64, 4 * MB))


@pytest.mark.large
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("limit_mib", "model", "front_ends", "certain_bytes"),
    [
        # Bodies of an eleventh of the memory are served whatever came before, as long as the models need little of it.
        *((limit, model, 1, limit * MIB // 11) for limit in (256, 512, 1024) for model in ("python", "onnx")),
        (153, "python", 1, 8 * MB),
        (512, "python", 2, 4 * MB),
        (512, "onnx", 2, 4 * MB),
    ],
)
def test_no_load_kills_a_process_of_a_container(
    tmp_path: Path, limit_mib: int, model: str, front_ends: int, certain_bytes: int
):
    flag = f"--frontend-processes={front_ends}"
    with memory_group(limit_mib * MIB) as group, server_in(group, tmp_path, model, flag) as server:
        for clients, size_bytes in 2 * LOADS:
            for module in (tritonclient.http, tritonclient.grpc):
                outcomes = send_at_once(server, module, clients, size_bytes)
                assert set(outcomes) <= {SERVED, REFUSED}, (outcomes, server.log)
                assert outcomes[SERVED] or size_bytes > certain_bytes, (size_bytes, server.log)
        assert (server.process.poll(), oom_kills(group)) == (None, 0), server.log
