"""Instances on several devices: each runs in a process that sees its own device alone."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.calls import load
from support.models import write_config
from support.played_driver import PlayedDriver, PlayedGpu, PlayedSlice, two_slices
from support.plugin import PLAIN_BACKEND, install_backend
from support.probe import provided
from support.served import add_python, infer, notes_file, workers
from support.server import RunningServer, Start, start_server

WHOLE = (PlayedGpu("GPU-0", 81559), PlayedGpu("GPU-1", 81559))
ON_ALL = "instance_group [ { kind: KIND_GPU count: 2 } ]"
ON_SECOND = "instance_group [ { kind: KIND_GPU gpus: [ 1 ] } ]"

NATIVE = (
    '''
"""A backend that computes in the process of its instance, like ONNX Runtime, and notes which devices that may use."""
import os

'''
    + PLAIN_BACKEND
    + """
class NativeBackend(PlainBackend):
    def supports_gpu(self):
        return True

    def load(self, config, source):
        return Model(config)


class Model:
    def __init__(self, config):
        self.notes = config.parameters["notes"].string_value

    def create_instance(self, placement):
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
        with open(self.notes, "a") as notes:
            notes.write(f"{placement.name} {seen} {os.getpid()}\\n")
        return self

    def run(self, inputs, outputs, context):
        return {"OUT": inputs["IN"]}

    def close(self):
        pass
"""
)
NATIVE_CONFIG = """
backend: "native"
max_batch_size: 8
input {{ name: "IN" data_type: TYPE_FP32 dims: -1 }}
output {{ name: "OUT" data_type: TYPE_FP32 dims: -1 }}
parameters {{ key: "notes" value {{ string_value: "{notes}" }} }}
{extra}
"""
THREAD = 'parameters { key: "ISOLATION" value { string_value: "thread" } }'


class Site:
    """A repository, and servers for it with a driver and the backend `native`."""

    def __init__(self, request: pytest.FixtureRequest, start: Start, repository: Path, folder: Path) -> None:
        self.repository = repository
        self.driver = provided(request.config, lambda: PlayedDriver(folder))
        self._start = start
        self._environment = {**self.driver.environment, **install_backend(folder, "native", NATIVE, "NativeBackend")}

    def add_native(self, name: str, extra: str) -> None:
        (self.repository / name / "1").mkdir(parents=True)
        notes = notes_file(self.repository, name)
        write_config(self.repository / name, NATIVE_CONFIG.format(notes=notes, extra=extra))

    def serve(self, *arguments: str, devices: Sequence[PlayedGpu | PlayedSlice]) -> RunningServer:
        self.driver.show(*devices)
        return self._start("--model-repository", self.repository, *arguments, environment=self._environment)

    def add_noting(self, name: str, group: str) -> None:
        """A python model."""
        initialize = (
            "def initialize(self, args):\n"
            "    note(f\"{args['model_instance_name']} {os.environ['CUDA_VISIBLE_DEVICES']} {os.getpid()}\")\n"
        )
        add_python(self.repository, name, methods=initialize)
        config = self.repository / name / "config.pbtxt"
        config.write_text(config.read_text().replace("instance_group [ { kind: KIND_CPU count: 1 } ]", group))

    def instances(self, model: str) -> dict[str, tuple[str, int]]:
        """The devices that an instance's process may use, and its id, by the instance's name."""
        lines = notes_file(self.repository, model).read_text().splitlines()
        noted = [line.split() for line in lines]
        assert len({name for name, _, _ in noted}) == len(noted), "an instance started twice"
        return {name: (seen, int(pid)) for name, seen, pid in sorted(noted)}

    def seen(self, model: str) -> list[str]:
        return [seen for seen, _ in self.instances(model).values()]


Sliced = tuple[Site, RunningServer]


@pytest.fixture
def site(request: pytest.FixtureRequest, start: Start, repository: Path, tmp_path: Path) -> Site:
    return Site(request, start, repository, tmp_path)


@pytest.fixture(scope="module")
def sliced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sliced]:
    """A server with two slices."""
    folder = tmp_path_factory.mktemp("sliced")
    repository = folder / "models"
    repository.mkdir()
    running: list[RunningServer] = []

    def start(*arguments: str | Path, **options: Any) -> RunningServer:
        running.append(start_server(folder, arguments, **options))
        return running[-1]

    site = Site(request, start, repository, folder)
    site.add_noting("py_all", ON_ALL)
    site.add_noting("py_second", ON_SECOND)
    site.add_native("all", ON_ALL)
    site.add_native("second", ON_SECOND)
    site.add_native("cpu", "instance_group [ { kind: KIND_CPU } ]")
    server = site.serve("--model-control-mode=explicit", "--load-model=*", devices=two_slices(0, 0))
    yield site, server
    server.kill()


def own_process(server: RunningServer, site: Site, model: str) -> bool:
    """Whether each instance has a process of its own."""
    pids = [pid for _, pid in site.instances(model).values()]
    return sorted(pids) == sorted(worker.pid for worker in workers(server, model)) and len(set(pids)) == len(pids)


def test_python_instances_run_in_processes_of_their_slices(sliced: Sliced) -> None:
    site, server = sliced
    assert site.seen("py_all") == ["MIG-0", "MIG-1", "MIG-0", "MIG-1"]
    assert own_process(server, site, "py_all")
    assert site.seen("py_second") == ["MIG-1"]
    assert infer(server, "py_all", 3.0) == (200, [3.0])
    assert infer(server, "py_second", 4.0) == (200, [4.0])


def test_a_native_backend_runs_in_processes_if_there_are_several_slices(sliced: Sliced) -> None:
    site, server = sliced
    assert site.seen("all") == ["MIG-0", "MIG-1", "MIG-0", "MIG-1"]
    assert own_process(server, site, "all")
    assert site.seen("second") == ["MIG-1"]
    assert own_process(server, site, "second")
    assert site.instances("cpu") == {"cpu_0_0": ("all", server.process.pid)}
    for model in ("all", "second", "cpu"):
        assert infer(server, model, 3.0) == (200, [3.0])
    listed = server.get("/v2/halimede/devices").json["devices"]  # type: ignore[index]
    assert [{each["model"]: each["count"] for each in device["instances"]} for device in listed] == [
        {"all": 2, "py_all": 2},
        {"all": 2, "py_all": 2, "py_second": 1, "second": 1},
    ]


@pytest.mark.parametrize(
    ("devices", "arguments", "is_apart"),
    [
        (two_slices(0), (), False),
        (WHOLE, (), False),
        (WHOLE, ("--process-per-device=true",), True),
        ((PlayedGpu("GPU-9", 81559), *two_slices(0)), (), True),
    ],
    ids=["one slice", "whole GPUs", "whole GPUs apart", "a whole GPU and a slice"],
)
def test_a_native_backend_stays_in_the_server_if_cuda_allows_it(
    site: Site, devices: Sequence[PlayedGpu | PlayedSlice], arguments: tuple[str, ...], is_apart: bool
) -> None:
    site.add_native("m", "instance_group [ { kind: KIND_GPU } ]")
    server = site.serve(*arguments, devices=devices)

    usable = [device.uuid for device in devices if not (isinstance(device, PlayedGpu) and device.mig == "1")]
    assert site.seen("m") == (usable if is_apart else ["all"] * len(usable))
    pids = {pid for _, pid in site.instances("m").values()}
    assert own_process(server, site, "m") if is_apart else pids == {server.process.pid}


def test_threads_are_refused_with_slices(sliced: Sliced) -> None:
    site, server = sliced
    site.add_native("threaded", f"{ON_ALL}\n{THREAD}")
    _, error = load(server, "threaded")
    assert "'ISOLATION' is 'thread', but a process can use only one MIG slice, and this server has 2" in error


def test_threads_are_kept_for_whole_gpus(site: Site) -> None:
    site.add_native("m", f"{ON_ALL}\n{THREAD}")
    server = site.serve("--process-per-device=true", devices=WHOLE)
    assert site.instances("m") == {f"m_0_{number}": ("all", server.process.pid) for number in range(4)}


def test_visible_devices_of_the_server_limit_its_processes(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1,MIG-2")
    site.add_native("m", "instance_group [ { kind: KIND_GPU } ]")
    site.serve(devices=two_slices(0, 0, 0))
    assert site.seen("m") == ["MIG-1", "MIG-2"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "MIG-1,MIG-2"
