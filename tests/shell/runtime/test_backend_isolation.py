"""The settings of a backend can decide where its models run, before anything of a model is opened."""

from pathlib import Path

import pytest

from halimede.core.inventory import Inventory
from halimede.core.repository.load_errors import ConfigError
from halimede.core.types import Device, DeviceKind
from halimede.runtime.prepare import LoadOptions, plan_model
from halimede.runtime.repository import ModelRepository
from halimede.workers.abandon import Abandon
from support.models import write_config

ONE_GPU = Inventory((Device(DeviceKind.GPU, 0, "GPU-0"),))
CONFIG = """
input { name: "x" data_type: TYPE_FP32 dims: 4 }
output { name: "y" data_type: TYPE_FP32 dims: 4 }
"""


def isolation(tmp_path: Path, extra: str = "", **settings: str) -> str:
    (tmp_path / "m" / "1").mkdir(parents=True, exist_ok=True)
    (tmp_path / "m" / "1" / "model.plan").write_bytes(b"no engine")
    write_config(tmp_path / "m", CONFIG + extra)
    entry = ModelRepository((tmp_path,)).find("m")
    assert entry is not None
    given = {key.replace("_", "-"): text for key, text in settings.items()}
    return plan_model(entry, LoadOptions(ONE_GPU, {"tensorrt": given}, autocomplete=False), Abandon()).isolation


def test_native_code_of_tensorrt_models_runs_in_processes_only(tmp_path: Path) -> None:
    assert isolation(tmp_path) == "thread"
    assert isolation(tmp_path, plugins="/a.so") == "process"
    assert isolation(tmp_path, version_compatible="true") == "process"
    thread = 'parameters { key: "ISOLATION" value { string_value: "thread" } }'
    with pytest.raises(ConfigError, match="instances of backend 'tensorrt' always run in processes"):
        isolation(tmp_path, thread, plugins="/a.so")
    with pytest.raises(
        ConfigError, match="--backend-config tensorrt,version-compatible=maybe: it must be true or false"
    ):
        isolation(tmp_path, version_compatible="maybe")
