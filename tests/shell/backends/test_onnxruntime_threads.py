"""How many threads the sessions of a model have, and which instances share them."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from halimede.backends.cores import quota_cores
from halimede.backends.onnxruntime.threads import ThreadPlan, plan_threads
from halimede.core.config.model_config import (
    InstanceKind,
    ModelParameter,
)
from halimede.core.types import Placement
from support.forked import run_python
from support.onnx_models import (
    ADD_SUB,
    BACKEND,
    CONTEXT,
    add_sub,
    floats,
    group,
    source,
)


def instances(directory: Path, count: int, **parameters: str):
    settings = replace(
        ADD_SUB,
        instance_group=group(InstanceKind.KIND_CPU, count),
        parameters={key: ModelParameter(value) for key, value in parameters.items()},
    )
    loaded = BACKEND.load(settings, source(directory, add_sub()))
    return [loaded.create_instance(Placement(f"m_{i}", i, "CPU")) for i in range(count)]


def test_instances_run_in_parallel_on_a_shared_session(tmp_path):
    several = instances(tmp_path, 4)
    inputs = {"a": floats([1, 2]), "b": floats([3, 4])}
    begin = threading.Barrier(len(several))

    def work(instance) -> list:
        begin.wait(10)
        return [instance.run(inputs, ["sum"], CONTEXT)["sum"].tolist() for _ in range(200)]

    with ThreadPoolExecutor(len(several)) as pool:
        assert list(pool.map(work, several)) == [[[[4, 6]]] * 200] * 4


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (plan_threads(2, 2), ThreadPlan(intra=1, inter=1, spin=True, share=True)),
        (plan_threads(16, 2), ThreadPlan(intra=15, inter=1, spin=True, share=True)),
        (plan_threads(2, 4), ThreadPlan(intra=1, inter=1, spin=False, share=True)),
        (plan_threads(4, 1), ThreadPlan(intra=4, inter=1, spin=True, share=True)),
        (plan_threads(16, 2, intra=1), ThreadPlan(intra=1, inter=1, spin=True, share=True)),
        (plan_threads(16, 2, intra=4), ThreadPlan(intra=4, inter=1, spin=True, share=False)),
        (plan_threads(4, 2, intra=4), ThreadPlan(intra=4, inter=1, spin=False, share=False)),
        (plan_threads(4, 2, parallel=True), ThreadPlan(intra=2, inter=2, spin=True, share=False)),
        (plan_threads(4, 1, intra=2, inter=3, parallel=True), ThreadPlan(intra=2, inter=3, spin=True, share=True)),
        (plan_threads(16, 2, can_share=False), ThreadPlan(intra=8, inter=1, spin=True, share=False)),
    ],
)
def test_threads_are_planned_so_that_the_instances_share_the_cores(plan, expected):
    assert plan == expected


@pytest.mark.parametrize(
    ("cpu_max", "cores"), [("max 100000\n", None), ("200000 100000\n", 2), ("50000 100000", 1), ("", None)]
)
def test_a_containers_quota_counts_whole_cores(cpu_max, cores):
    assert quota_cores(cpu_max) == cores


PREAMBLE = """
import os, sys
from dataclasses import replace
from pathlib import Path
from halimede.backends.api import ModelSource
from halimede.backends.onnxruntime import OnnxRuntimeBackend
from halimede.core.config.model_config import InstanceKind, ModelConfig, ModelInstanceGroup, ModelParameter
from halimede.core.types import Placement

def threads():
    return len(os.listdir("/proc/self/task"))

def where(**options):
    directory = Path(sys.argv[1])
    return ModelSource("m", 1, directory, directory / "1" / "model.onnx", options)

backend = OnnxRuntimeBackend()
"""


def in_a_new_process(code: str, directory: Path) -> str:
    """What `code` prints in a process of its own: threads of other tests' sessions must not be counted."""
    done = run_python("-c", PREAMBLE + code, directory)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_sessions_start_the_threads_of_their_plan(tmp_path):
    source(tmp_path, add_sub())
    printed = in_a_new_process(
        """
config = backend.autocomplete(ModelConfig(), where())

def started(count, **parameters):
    groups = (ModelInstanceGroup("m", InstanceKind.KIND_CPU, count),)
    parameters = {key: ModelParameter(value) for key, value in parameters.items()}
    before = threads()
    model = backend.load(replace(config, instance_group=groups, parameters=parameters), where())
    instances = [model.create_instance(Placement("m", i, "CPU")) for i in range(count)]
    return threads() - before

print(*(started(count, intra_op_thread_count=each) for count, each in ((4, "1"), (1, "4"), (2, "3"))))
""",
        tmp_path,
    )
    assert printed == "0 3 4"


def test_all_models_can_share_one_pool_of_threads(tmp_path):
    source(tmp_path, add_sub())
    printed = in_a_new_process(
        """
backend.supports_gpu()
before = threads()
pool = {"enable-global-threadpool": "1", "intra-op-thread-count": "3", "inter-op-thread-count": "1"}
config = backend.autocomplete(ModelConfig(), where(**pool))
models = [backend.load(config, where(**pool)) for _ in range(3)]
print(threads() - before)
""",
        tmp_path,
    )
    assert printed == "2"
