"""TensorFlow on a real GPU. Skipped where there is none, or where the installed TensorFlow is not built for CUDA."""

import json
import subprocess
import sys

import numpy as np
import pytest

from halimede.backends.tensorflow import TensorFlowBackend
from support.gpus import needs_gpu

pytestmark = [
    needs_gpu,
    pytest.mark.skipif(not TensorFlowBackend().supports_gpu(), reason="no TensorFlow with CUDA is installed here"),
]

# In a process of its own, as an instance: see tests/shell/backends/test_tensorflow_instance.py.
CODE = """
import json, sys
from dataclasses import replace
from pathlib import Path
import numpy as np
from halimede.backends.api import ModelSource, RunContext
from halimede.backends.tensorflow import TensorFlowBackend
from halimede.core.config.read import read_json
from halimede.core.types import Device, DeviceKind, Placement

folder, kind, changes = Path(sys.argv[1]), sys.argv[2], read_json(sys.argv[3]).config
source = ModelSource("network", 1, folder, folder / "network")
config = TensorFlowBackend().autocomplete(replace(changes, platform="tensorflow_savedmodel"), source)
model = TensorFlowBackend().load(config, source)
instance = model.create_instance(Placement("m_0", 0, kind, Device(DeviceKind.GPU, 0, "GPU-0") if kind == "GPU" else None))
rows = np.asarray(json.loads(sys.argv[4]), np.float32)
print(json.dumps(instance.run({"x": rows}, ["scores"], RunContext([""], [5], []))["scores"].tolist()))
"""
MIXED = {
    "execution_accelerators": {"gpu_execution_accelerator": [{"name": "auto_mixed_precision"}, {"name": "gpu_io"}]}
}


@pytest.mark.parametrize("optimization", [{}, {"graph": {"level": 1}}, MIXED], ids=["plain", "xla", "mixed precision"])
def test_a_gpu_computes_what_a_cpu_computes(request, optimization):
    # What builds the models has imports that only a machine with TensorFlow has.
    from support.probe import provided
    from support.tensorflow_models import ROWS, built_models, expected

    folder = provided(request.config, built_models)
    changes = {"instance_group": [{"kind": "KIND_GPU", "count": 1, "gpus": [0]}], "optimization": optimization}
    arguments = [str(folder), "GPU", json.dumps(changes), json.dumps(ROWS.tolist())]
    printed = subprocess.check_output([sys.executable, "-c", CODE, *arguments], text=True)
    np.testing.assert_allclose(json.loads(printed), expected("scores"), rtol=2e-2, atol=2e-3)
