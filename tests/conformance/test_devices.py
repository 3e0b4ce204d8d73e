"""What a server reports of its devices, with the real pynvml over a driver library without GPUs."""

from pathlib import Path

import pytest

from support.models import add_identity
from support.played_driver import MIB, PlayedDriver, PlayedGpu, PlayedSlice, two_slices
from support.probe import provided
from support.served import add_python
from support.server import RunningServer, Start, wait_until

DEVICES = "/v2/halimede/devices"


@pytest.fixture
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> PlayedDriver:
    return provided(request.config, lambda: PlayedDriver(tmp_path, *two_slices(100, 200)))


def devices(server: RunningServer) -> list[dict[str, object]]:
    answer = server.get(DEVICES)
    assert answer.status == 200, answer.body
    return answer.json["devices"]  # type: ignore[index,no-any-return]


def test_slices_are_listed_by_uuid_with_profile_memory_and_instances(
    start: Start, repository: Path, driver: PlayedDriver
) -> None:
    add_python(repository, "both", extra="instance_group [ { kind: KIND_GPU count: 2 } ]")
    add_python(repository, "second", extra="instance_group [ { kind: KIND_GPU gpus: [ 1 ] } ]")
    add_python(repository, "third")
    config = repository / "third" / "config.pbtxt"
    config.write_text(config.read_text().replace("kind: KIND_CPU", "kind: KIND_GPU gpus: [ 1 ]"))
    add_identity(repository, "on_cpu")
    server = start("--model-repository", repository, environment=driver.environment)

    first = {"model": "both", "version": "1", "count": 2}
    common = {
        "kind": "MIG",
        "name": "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "profile": "1g.10gb",
        "compute_capability": "9.0",
        "memory_total_bytes": 9856 * MIB,
    }
    assert devices(server) == [
        {
            **common,
            "index": 0,
            "uuid": "MIG-0",
            "memory_used_bytes": 100 * MIB,
            "memory_before_bytes": 100 * MIB,
            "memory_peak_bytes": 100 * MIB,
            "instances": [first],
        },
        {
            **common,
            "index": 1,
            "uuid": "MIG-1",
            "memory_used_bytes": 200 * MIB,
            "memory_before_bytes": 200 * MIB,
            "memory_peak_bytes": 200 * MIB,
            "instances": [first, *({"model": name, "version": "1", "count": 1} for name in ("second", "third"))],
        },
    ]
    counts = {line for line in server.metrics().splitlines() if line.startswith("nv_inference_count{")}
    assert counts == {
        'nv_inference_count{model="both",version="1"} 0',
        'nv_inference_count{model="second",version="1"} 0',
        'nv_inference_count{gpu_uuid="MIG-1",model="third",version="1"} 0',
        'nv_inference_count{model="on_cpu",version="1"} 0',
    }


def test_memory_before_the_load_and_the_peak_stay_while_use_changes(
    start: Start, repository: Path, driver: PlayedDriver
) -> None:
    """The interval is an hour: the samples are those of the start and of the ends of loads."""
    add_identity(repository, "ident")
    arguments = ("--model-repository", repository, "--metrics-interval-ms=3600000")
    server = start(*arguments, "--model-control-mode=explicit", environment=driver.environment)

    def memory() -> list[object]:
        return [devices(server)[0][f"memory_{which}_bytes"] // MIB for which in ("before", "used", "peak")]  # type: ignore[operator]

    wait_until(lambda: memory() == [100, 100, 100], "the first sample", server)
    for used, peak in ((5000, 5000), (700, 5000), (6000, 6000)):
        driver.show(*two_slices(used, 200))
        assert server.post("/v2/repository/models/ident/load").status == 200
        wait_until(lambda used=used, peak=peak: memory() == [100, used, peak], f"{used} MiB in use", server)  # type: ignore[misc]


def test_no_model_is_loaded_before_the_memory_is_read(start: Start, repository: Path, driver: PlayedDriver) -> None:
    """The driver is slow, and the model takes memory as soon as it is loaded."""
    take = """
    def initialize(self, args):
        path = os.environ["PLAYED_DEVICES"]
        with open(path) as old, open(path + ".taken", "w") as new:
            new.write(old.read().replace(" 9856 100 ", " 9856 7000 "))
        os.replace(path + ".taken", path)
    """
    add_python(repository, "taker", methods=take)
    server = start("--model-repository", repository, environment={**driver.environment, "PLAYED_INIT_SECONDS": "2"})
    wait_until(lambda: devices(server)[0]["memory_peak_bytes"] == 7000 * MIB, "a sample after the load", server)
    assert devices(server)[0]["memory_before_bytes"] == 100 * MIB


def test_the_gpu_metrics_are_those_of_the_devices_by_uuid(start: Start, repository: Path, tmp_path: Path) -> None:
    gpu = PlayedGpu("GPU-whole", 15109, 300, "Tesla T4", capability="7.5")
    driver = PlayedDriver(tmp_path, gpu, *two_slices(100, 200))
    server = start(
        *("--model-repository", repository, "--metrics-interval-ms=20"),
        environment={**driver.environment, "CUDA_VISIBLE_DEVICES": "GPU-whole,MIG-1"},
    )

    def used() -> dict[str, str]:
        lines = [line for line in server.metrics().splitlines() if line.startswith("nv_gpu_memory_used_bytes{")]
        return {line.split('"')[1]: line.rsplit(" ", 1)[1] for line in lines}

    wait_until(lambda: used() == {"GPU-whole": str(300 * MIB), "MIG-1": str(200 * MIB)}, "the metrics", server)
    page = server.metrics()
    assert 'nv_gpu_utilization{gpu_uuid="GPU-whole"} 0.42' in page
    assert 'nv_gpu_power_usage{gpu_uuid="GPU-whole"} 210.5' in page
    assert 'nv_gpu_power_usage{gpu_uuid="MIG-1"}' not in page
    driver.show(gpu, *two_slices(100, 9000))
    wait_until(lambda: used()["MIG-1"] == str(9000 * MIB), "the new sample", server)


def test_without_gpu_metrics_the_memory_is_still_reported(start: Start, repository: Path, driver: PlayedDriver) -> None:
    server = start("--model-repository", repository, "--allow-gpu-metrics=false", environment=driver.environment)
    assert [device["memory_used_bytes"] for device in devices(server)] == [100 * MIB, 200 * MIB]
    assert "nv_gpu_memory_used_bytes{" not in server.metrics()


def test_profile_comes_from_the_sizes_if_the_name_has_none(start: Start, repository: Path, tmp_path: Path) -> None:
    driver = PlayedDriver(
        tmp_path,
        PlayedGpu("GPU-0", 81559, mig="1"),
        PlayedSlice("MIG-3g", 40192, name="Graphics Device", gpu_slices=3, compute_slices=3),
        PlayedSlice("MIG-1c", 40192, name="Graphics Device", gpu_slices=3, compute_slices=1),
    )
    server = start("--model-repository", repository, environment=driver.environment)
    assert [device["profile"] for device in devices(server)] == ["3g.40gb", "1c.3g.40gb"]


def test_without_a_driver_only_the_memory_of_the_host_is_reported(
    start: Start, repository: Path, driver: PlayedDriver
) -> None:
    no_driver = {**driver.environment, "PLAYED_DEVICES": "/nowhere"}
    server = start("--model-repository", repository, environment=no_driver)
    report = server.get(DEVICES).json
    assert report["devices"] == []  # type: ignore[index]
    assert report["host"]["memory_peak_bytes"] > 10 * MIB  # type: ignore[index]


@pytest.mark.parametrize("percent", [None, 35])
def test_slices_have_a_utilization_where_the_driver_measures_it(
    start: Start, repository: Path, driver: PlayedDriver, percent: int | None
) -> None:
    add_identity(repository, "ident")
    gpm = {} if percent is None else {"PLAYED_GPM_PERCENT": str(percent)}
    arguments = ("--model-repository", repository, "--metrics-interval-ms=20")
    server = start(*arguments, environment={**driver.environment, **gpm})

    def values(name: str) -> dict[str, float]:
        lines = [line for line in server.metrics().splitlines() if line.startswith(f"nv_gpu_{name}{{")]
        return {line.split('"')[1]: float(line.split()[-1]) for line in lines}

    memory = {"MIG-0": 100.0 * MIB, "MIG-1": 200.0 * MIB}
    wait_until(lambda: values("memory_used_bytes") == memory, "the memory of the slices", server)
    if percent is not None:
        wait_until(lambda: values("utilization") == {"MIG-0": 0.35, "MIG-1": 0.35}, "the utilization", server)
        return
    # Later samples have none either: GPM needs two.
    driver.show(*two_slices(101, 200))
    wait_until(lambda: values("memory_used_bytes")["MIG-0"] == 101.0 * MIB, "a later sample", server)
    assert values("utilization") == {}
