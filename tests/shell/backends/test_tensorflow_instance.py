"""Instances of the TensorFlow backend: the memory of their inputs, their bound, and a device that is not there.

TensorFlow is imported in a process of its own: the backend imports a part of it, with which nothing else can work.
"""

import json
import os
import subprocess
import sys

import pytest

from support.probe import provided
from support.tensorflow_models import built_models

CODE = """
import json, mmap, sys
from pathlib import Path
import numpy as np
import halimede.backends.tensorflow.instance as limits
from halimede.backends.api import ModelSource, RunContext
from halimede.backends.tensorflow import TensorFlowBackend
from halimede.core.config.model_config import ModelConfig
from halimede.core.types import InferenceError, Placement

folder, context, found = Path(sys.argv[1]), RunContext([""], [1], []), {}
memory = mmap.mmap(-1, 1 << 16)  # of a page, as the memory that server and processes share
numbers = np.frombuffer(memory, np.float32, 8192)
for name, shape, output in (("remembering", (8192,), "before"), ("network", (512, 16), "same")):
    source = ModelSource(name, 1, folder, folder / name)
    config = TensorFlowBackend().autocomplete(ModelConfig(platform="tensorflow_savedmodel"), source)
    model = TensorFlowBackend().load(config, source)
    instance = model.create_instance(Placement("m_0", 0, "CPU"))
    array = np.frombuffer(memoryview(memory).toreadonly(), np.float32, 8192).reshape(shape)
    results = []
    for value in (1, 2, 3):
        numbers[:] = value
        results.append(instance.run({"x": array}, [output], context)[output])
        numbers[:] = 9
    found[name] = [sorted(set(result.ravel().tolist())) for result in results]
    if name == "network":
        limits.CALLABLES = 2
        names = [list(instance.run({"x": array}, outputs, context)) for outputs in (["same"], ["scores"], ["same"])]
        found["combinations"] = [names, len(instance._callables)]
    instance.close()
    model.close()
try:
    model.create_instance(Placement("m_0", 0, "GPU"))
except InferenceError as error:
    found["gpu"] = [error.code.name, error.message.partition(" cannot")[2]]
print(json.dumps(found))
"""


@pytest.mark.timeout(600)
def test_instance_is_bounded_and_keeps_no_memory_of_inputs(request):
    folder = provided(request.config, built_models)
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    printed = subprocess.check_output([sys.executable, "-c", CODE, str(folder)], env=environment, text=True)
    assert json.loads(printed) == {
        "remembering": [[0], [1], [2]],
        "network": [[1], [2], [3]],
        "combinations": [[["same"], ["scores"], ["same"]], 2],
        "gpu": ["INTERNAL", " open its GPU: the driver or its libraries are missing, or do not fit it"],
    }
