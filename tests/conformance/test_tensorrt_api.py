"""The played TensorRT and CUDA have the names and arguments of the real packages."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from support.played_gpu import cudart, trt
from support.probe import provided
from support.tensorrt_api import LIST, NEWEST, OLDEST, bindings, described, names

SERVER = Path(__file__).parents[2] / "server"
ONLY_NEWER = ("ICudaEngine.get_aliased_input_tensor",)

REAL = """
import sys
sys.path[:0] = sys.argv[1:]
import tensorrt_bindings as trt
from halimede.backends.tensorrt.buffers import make_allocator
from halimede.backends.tensorrt.libraries import join
from halimede.backends.tensorrt.options import STRATEGIES
from halimede.backends.tensorrt.signature import DATATYPES

class Block:
    address = 7
    def fit(self, size):
        pass

libraries = join(trt, None)
libraries.logger.log(trt.ILogger.Severity.ERROR, "the cause")
assert libraries.errors.text() == "the cause"
allocator = make_allocator(trt, Block())
assert isinstance(allocator, trt.IOutputAllocator)
assert allocator.reallocate_output_async("y", 0, 5, 256, 0) == 7
assert all(hasattr(trt.DataType, name) for name in DATATYPES)
assert all(hasattr(trt.ExecutionContextAllocationStrategy, name) for name in STRATEGIES)
try:
    trt.Runtime(libraries.logger)
except TypeError as error:
    print(error)
"""


def test_the_list_of_names_is_that_of_the_newest_package(request: pytest.FixtureRequest) -> None:
    """`python tests/support/tensorrt_api.py` writes the list."""
    found = provided(request.config, lambda: described(*NEWEST, names()))
    assert found == LIST.read_text().splitlines()


def test_the_oldest_package_has_all_names_with_the_same_arguments(request: pytest.FixtureRequest) -> None:
    found = provided(request.config, lambda: described(*OLDEST, names()))
    arguments = {line.partition(" -> ")[0].partition(":")[0] for line in found if "(" not in line}
    arguments |= {line.partition(" -> ")[0] for line in found if "(" in line}
    played = [line for line in _played_lines() if not line.startswith(ONLY_NEWER)]
    assert [line for line in played if line not in arguments] == []


def _played_lines() -> list[str]:
    """The lines of the list for overloads that the backend uses, without results."""
    unused = (
        "deserialize_cuda_engine(stream",
        "create_execution_context(runtime",
        "set_input_shape(name: str, shape: l",
    )
    lines = [line.partition(" -> ")[0] for line in LIST.read_text().splitlines()]
    return [line.partition(":")[0] if "(" not in line else line for line in lines if not any(u in line for u in unused)]


@pytest.mark.parametrize("package", [NEWEST, OLDEST], ids="-".join)
def test_the_real_package_takes_our_logger_and_allocator(
    request: pytest.FixtureRequest, package: tuple[str, str]
) -> None:
    folder = provided(request.config, lambda: bindings(*package))
    done = subprocess.run(
        [sys.executable, "-c", REAL, str(folder), str(SERVER)],
        env={"LD_LIBRARY_PATH": str(folder / "empty")},
        capture_output=True,
        text=True,
        check=False,
    )
    # A runtime that cannot start is a null pointer, which `open_engine` expects as this error.
    assert (done.returncode, done.stdout) == (0, "pybind11::init(): factory function returned nullptr\n"), done.stderr


def test_every_played_name_is_in_the_list_with_its_arguments() -> None:
    listed: dict[str, list[list[str]]] = {}
    for line in LIST.read_text().splitlines():
        name, _, rest = line.partition("(")
        words = rest.rpartition(") ->")[0].split(", ") if rest else []
        listed.setdefault(name.partition(":")[0], []).append([word.partition(":")[0] for word in words if word])
    played = {name: getattr(trt, name) for name in ("get_plugin_registry", "init_libnvinfer_plugins")}
    for owner in ("ILogger", "IPluginRegistry", "Runtime", "ICudaEngine", "IExecutionContext"):
        for name, member in vars(getattr(trt, owner)).items():
            if inspect.isfunction(member) and not name.startswith("_"):
                played[f"{owner}.{name}"] = member
    assert len(played) > 20
    for name, function in played.items():
        arguments = [each for each in inspect.signature(function).parameters if each != "self"]
        assert arguments in listed[name], name
    for name, known in listed.items():
        if isinstance(getattr(trt, name, None), type(trt.DataType)):
            words = next(line for line in LIST.read_text().splitlines() if line.startswith(name)).split()[1:]
            assert set(getattr(trt, name).__members__) <= set(words), name
        assert known


def test_every_played_function_of_cuda_has_the_arguments_of_the_real_one() -> None:
    real = pytest.importorskip("cuda.bindings.runtime")
    played = {name: each for name, each in vars(cudart).items() if name.startswith("cuda") and inspect.isfunction(each)}
    assert len(played) > 20
    for name, function in played.items():
        real_names = list(inspect.signature(getattr(real, name)).parameters)
        assert list(inspect.signature(function).parameters) == real_names, name
    for name in ("cudaError_t", "cudaMemcpyKind", "cudaStreamCaptureMode"):
        mine = {each.name: each.value for each in getattr(cudart, name)}
        assert mine == {each: getattr(getattr(real, name), each).value for each in mine}
    for name in ("cudaStreamNonBlocking", "cudaEventBlockingSync", "cudaEventDisableTiming"):
        assert getattr(cudart, name) == getattr(real, name)


def test_the_real_cuda_without_a_driver_is_a_clear_error() -> None:
    real = pytest.importorskip("cuda.bindings.runtime")
    from halimede.backends.tensorrt.cuda import Cuda
    from halimede.core.types import ErrorCode, InferenceError

    if int(real.cudaGetDeviceCount()[0]) == 0:
        pytest.skip("there is a GPU")
    with pytest.raises(
        InferenceError, match="TensorRT backend supports only GPU device; CUDA: device 0 cannot"
    ) as caught:
        Cuda(real).use(0)
    assert caught.value.code is ErrorCode.UNSUPPORTED
