"""Backends that each break one rule of `halimede.backends.api`, beside one that keeps all.

A model has a file `model.json` with a factor. OUT0 is IN times the factor, OUT1 is IN plus the factor; a row of IN that
contains 13 is refused.
"""

import os
from pathlib import Path

SOURCE = """
import json
import os
import threading
import time

import numpy as np
from halimede.backends.api import RefusedRequestsError
from halimede.core.types import DataType, ErrorCode, InferenceError
from halimede.core.types.tensor import tensor_from_array

KEPT = []


class Good:
    default_model_filename = "model.json"
    isolation = "thread"

    def default_instance_count(self, kind):
        return 1

    def supports_gpu(self):
        return False

    def autocomplete(self, config, source):
        return config

    def check(self, config, source):
        self.read(source)

    def read(self, source):
        try:
            return np.float32(json.loads(source.artifact.read_text())["factor"])
        except (OSError, ValueError, KeyError) as error:
            raise InferenceError(ErrorCode.INVALID_ARG, f"{source.artifact.name}: {error!r}") from error

    def load(self, config, source):
        return Model(self, self.read(source))

    def run(self, instance, inputs, outputs, context):
        self.refuse(inputs, context)
        found = self.compute(instance, inputs["IN"])
        return {name: found[name] for name in outputs}

    def refuse(self, inputs, context):
        bad = {}
        at = 0
        for position, rows in enumerate(context.rows):
            if (inputs["IN"][at : at + rows] == 13).any():
                bad[position] = InferenceError(ErrorCode.INVALID_ARG, "13 is not allowed")
            at += rows
        if bad:
            raise RefusedRequestsError(bad)

    def compute(self, instance, array):
        return {"OUT0": array * instance.factor, "OUT1": array + instance.factor}


class Model:
    def __init__(self, backend, factor):
        self.backend = backend
        self.factor = factor
        self.buffer = None

    def create_instance(self, placement):
        return Instance(self)

    def close(self):
        pass


class Instance:
    def __init__(self, model):
        self.model = model
        self.factor = model.factor
        self.seen = []
        self.sums = {}

    def run(self, inputs, outputs, context):
        return self.model.backend.run(self, inputs, outputs, context)

    def close(self):
        pass


class NoInstances(Good):
    def default_instance_count(self, kind):
        return 0


class PreloadsNothing(Good):
    def preload(self, source):
        return "nowhere:load"


class PreloadsNoFunction(Good):
    def preload(self, source):
        return "json:JSON"


class BothMethods(Good):
    def load(self, config, source):
        model = super().load(config, source)
        make = model.create_instance

        def create_instance(placement):
            instance = make(placement)
            instance.execute = lambda requests: None
            return instance

        model.create_instance = create_instance
        return model


class ChangesBatch(Good):
    def autocomplete(self, config, source):
        from dataclasses import replace

        return replace(config, max_batch_size=config.max_batch_size + 1)


class WrongDatatype(Good):
    def compute(self, instance, array):
        return {name: each.astype(np.float64) for name, each in super().compute(instance, array).items()}


class SmallBatches(Good):
    def compute(self, instance, array):
        if len(array) > 4:
            raise ValueError("at most 4 rows")
        return super().compute(instance, array)


class KeepsFirstShape(Good):
    def compute(self, instance, array):
        instance.seen.append(array.shape[1:])
        if array.shape[1:] != instance.seen[0]:
            raise ValueError(f"the shape is {instance.seen[0]}")
        return super().compute(instance, array)


class BrokenByNothing(Good):
    def compute(self, instance, array):
        if not array.size:
            instance.factor = np.float32(0)
        return super().compute(instance, array)


class BrokenByNan(Good):
    def compute(self, instance, array):
        if not np.isfinite(array).all():
            instance.factor = np.float32("nan")
        return super().compute(instance, array)


class BatchMean(Good):
    def compute(self, instance, array):
        return super().compute(instance, array - array.mean(axis=0))


class FirstOutputOnly(Good):
    def run(self, instance, inputs, outputs, context):
        found = self.compute(instance, inputs["IN"])
        return found if len(outputs) > 1 else {"OUT0": found["OUT0"]}


class WritesInputs(Good):
    def compute(self, instance, array):
        array *= instance.factor
        return {"OUT0": array.copy(), "OUT1": array.copy()}


class WritesInputsAnyhow(Good):
    def compute(self, instance, array):
        import ctypes

        found = super().compute(instance, array)
        ctypes.memset(array.ctypes.data, 0, array.nbytes)
        return found


class ReusesBuffer(Good):
    def compute(self, instance, array):
        found = super().compute(instance, array)
        if not instance.seen or instance.seen[0]["OUT0"].shape != found["OUT0"].shape:
            instance.seen = [found]
        for name, each in found.items():
            instance.seen[0][name][...] = each
        return instance.seen[0]


class FailsWholeBatch(Good):
    def refuse(self, inputs, context):
        if (inputs["IN"] == 13).any():
            raise InferenceError(ErrorCode.INVALID_ARG, "13 is not allowed")


class StopsForOne(Good):
    def run(self, instance, inputs, outputs, context):
        if any(flag.cancelled for flag in context.cancel_flags):
            raise InferenceError(ErrorCode.CANCELLED, "cancelled")
        return super().run(instance, inputs, outputs, context)


class SharesBuffer(Good):
    def compute(self, instance, array):
        model = instance.model
        model.buffer = array
        time.sleep(0.002)
        return super().compute(instance, model.buffer)


class LeaksMemory(Good):
    def load(self, config, source):
        KEPT.append(np.ones(1 << 19))
        return super().load(config, source)


class LeaksDescriptors(Good):
    def load(self, config, source):
        os.open(source.artifact, os.O_RDONLY)
        return super().load(config, source)


class LeaksThreads(Good):
    def load(self, config, source):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        return super().load(config, source)


class EndsThreadsLate(Good):
    # Breaks no rule: a runtime may end its threads a little after it is closed.

    def load(self, config, source):
        threading.Thread(target=time.sleep, args=(0.5,)).start()
        return super().load(config, source)


class OtherErrors(Good):
    def read(self, source):
        return np.float32(json.loads(source.artifact.read_text())["factor"])


class LoadsAnything(Good):
    def read(self, source):
        try:
            return super().read(source)
        except InferenceError:
            return np.float32(1)


class ChecksNothing(Good):
    def check(self, config, source):
        pass


class KnowsItsProcess(Good):
    def compute(self, instance, array):
        return super().compute(instance, array + np.float32(os.getpid() % 10_000))


class Crashes(Good):
    def compute(self, instance, array):
        if len(array) > 1:
            os.kill(os.getpid(), 11)
        return super().compute(instance, array)


class Sums(Good):
    # The outputs are those of the sum of IN since the start of the sequence, which is kept by row.

    def run(self, instance, inputs, outputs, context):
        self.refuse(inputs, context)
        array = inputs["IN"].copy()
        for row, (start, ready) in enumerate(zip(inputs["START"][:, 0], inputs["READY"][:, 0])):
            array[row] = self.sum(instance, row, array[row], start, ready)
        found = self.compute(instance, array)
        return {name: found[name] for name in outputs}

    def sum(self, instance, row, values, start, ready):
        if ready:
            before = 0 if start else instance.sums.get(row, 0)
            instance.sums[row] = before + values
        return instance.sums.get(row, values)


class StateSums(Good):
    # As Sums, with the sum as a state of the configuration.

    def run(self, instance, inputs, outputs, context):
        self.refuse(inputs, context)
        array = inputs["IN"] + np.where(inputs["START"] > 0, 0, inputs["BEFORE"])
        found = {**self.compute(instance, array), "AFTER": array}
        return {name: found[name] for name in outputs}


class OneSum(Sums):
    def sum(self, instance, row, values, start, ready):
        return super().sum(instance, 0, values, start, ready)


class NeverStarts(Sums):
    def sum(self, instance, row, values, start, ready):
        return super().sum(instance, row, values, row not in instance.sums, ready)


class IgnoresReady(Sums):
    def sum(self, instance, row, values, start, ready):
        return super().sum(instance, row, values, start, True)


class Streams(Good):
    # Each request gets three answers: those of IN, IN plus 1, and IN plus 2.

    isolation = "process"

    def load(self, config, source):
        model = super().load(config, source)
        model.create_instance = lambda placement: StreamInstance(model)
        return model

    def stream(self, instance, requests):
        for request in requests:
            self.answer(instance, request, request.inputs["IN"].array())

    def answer(self, instance, request, array, count=3):
        for at in range(count):
            found = self.compute(instance, array + np.float32(at))
            tensors = [tensor_from_array(name, DataType.FP32, each) for name, each in found.items()]
            request.respond(tensors, final=at == 2)


class StreamInstance:
    def __init__(self, model):
        self.backend = model.backend
        self.factor = model.factor
        self.sums = {}

    def execute(self, requests):
        self.backend.stream(self, requests)

    def close(self):
        pass


class NeverEnds(Streams):
    def answer(self, instance, request, array):
        super().answer(instance, request, array, count=2)


class EndsEarly(Streams):
    def answer(self, instance, request, array):
        if request.id in instance.sums:
            request.respond([], final=True)
            return
        instance.sums[request.id] = True
        super().answer(instance, request, array)


class MixesInputs(Streams):
    def stream(self, instance, requests):
        for request in requests:
            self.answer(instance, request, requests[0].inputs["IN"].array())


class WrongAnswers(Streams):
    def compute(self, instance, array):
        return {name: each[..., None] for name, each in super().compute(instance, array).items()}
"""

SEQUENCES = """
sequence_batching {
  direct { }
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } }
  control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY fp32_false_true: [ 0, 1 ] } }
}
"""
STATE = """
  state { input_name: "BEFORE" output_name: "AFTER" data_type: TYPE_FP32 dims: -1 }
"""
DECOUPLED = "model_transaction_policy { decoupled: true }\n"
CONFIGURED = {"sequences": SEQUENCES, "restart": SEQUENCES, "null-rows": SEQUENCES, "responses": DECOUPLED}
"""What the configuration of a model has for a check."""

BROKEN = {
    "PreloadsNothing": ("interface", "preload names 'nowhere:load': No module named 'nowhere'"),
    "PreloadsNoFunction": ("interface", "preload names 'json:JSON', which is no function"),
    "NoInstances": ("interface", "default_instance_count('CPU') is 0"),
    "BothMethods": ("load", "an instance has run, execute"),
    "ChangesBatch": ("completion", "autocomplete changes max_batch_size"),
    "WrongDatatype": ("single", "output 'OUT0'"),
    "SmallBatches": ("full-batch", "at most 4 rows"),
    "KeepsFirstShape": ("dimensions", "variable dimensions of 5 fails"),
    "BrokenByNothing": ("no-elements", "another result after a request without elements"),
    "BrokenByNan": ("values", "another result after a request with extreme values"),
    "BatchMean": ("batching", "row 0 of a batch of 8 rows has another result than alone"),
    "FirstOutputOnly": ("outputs", "output 'OUT1' alone"),
    "WritesInputs": ("inputs", "read-only"),
    "WritesInputsAnyhow": ("inputs", "the content of input 'IN' was changed"),
    "ReusesBuffer": ("answers", "overwritten by a later run"),
    "FailsWholeBatch": ("refusals", "13 is not allowed"),
    "StopsForOne": ("cancellation", "beside a cancelled one"),
    "SharesBuffer": ("instances", "another result while others run"),
    "LeaksMemory": ("cycles", "KiB of memory"),
    "LeaksDescriptors": ("cycles", "open file descriptors"),
    "LeaksThreads": ("cycles", "threads"),
    "OtherErrors": ("load-errors", "raises"),
    "LoadsAnything": ("load-errors", "missing succeeds"),
    "ChecksNothing": ("check", "check accepts a file that is missing"),
    "KnowsItsProcess": ("process", "a worker process has another result"),
    "OneSum": ("sequences", "request 2 of a sequence beside another sequence has another result"),
    "NeverStarts": ("restart", "request 1 of a sequence after another one has ended has another result"),
    "IgnoresReady": ("null-rows", "whose row was a null row meanwhile has another result"),
    "NeverEnds": ("responses", "a request has no last answer after 3 s"),
    "EndsEarly": ("responses", "gets 0 answers instead of 3"),
    "MixesInputs": ("responses", "answer 1 to a request beside another request has another result"),
    "WrongAnswers": ("responses", "output 'OUT0' has shape [1, 4, 1]"),
}
"""By class: the check that must fail, and a part of its text. The backend's name is the class's in lower case."""


def install(site: Path) -> dict[str, str]:
    """Install all of them as one distribution. Returns the environment of processes that use it."""
    info = site / "broken_backends-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "broken_plugin.py").write_text(SOURCE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-backends\nVersion: 1.0\n")
    points = "\n".join(
        f"{name.lower()} = broken_plugin:{name}"
        for name in ("Good", "Sums", "StateSums", "Streams", "EndsThreadsLate", "Crashes", *BROKEN)
    )
    (info / "entry_points.txt").write_text(f"[halimede.backends]\n{points}\n")
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{site}{os.pathsep}{before}" if before else str(site)}


def write_model(directory: Path, backend: str, extra: str = "") -> Path:
    (directory / "1").mkdir(parents=True)
    (directory / "1" / "model.json").write_text('{"factor": 3}')
    (directory / "config.pbtxt").write_text(
        f'backend: "{backend}"\nmax_batch_size: 8\n'
        'input { name: "IN" data_type: TYPE_FP32 dims: -1 }\n'
        'output { name: "OUT0" data_type: TYPE_FP32 dims: -1 }\noutput { name: "OUT1" data_type: TYPE_FP32 dims: -1 }\n'
        + extra
    )
    return directory


REFUSED = '{"inputs": [{"name": "IN", "shape": [1, 4], "datatype": "FP32", "data": [0, 13, 0, 0]}]}'
"""A request that these models refuse."""
