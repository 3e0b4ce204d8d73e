"""The same task in each framework that is installed: a small classifier of handwritten digits.

`python -m halimede.demo.frameworks NAME FOLDER` trains the one of that name, in a process of its own: frameworks take
seconds to import, and not all of them can share a process. It writes the model, and what the framework itself answers
for the held-out images.
"""

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halimede.demo.digits import INPUT, OUTPUT, split_images
from halimede.demo.drive import Target
from halimede.demo.export import Export

MOST_ROWS = 64
HIDDEN = 128
SEED = 0
TRAINED_AT_ONCE = 2
OUTSIDE, IMAGES = "outside.npy", "images.npz"

Images = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Digits:
    """What a training gets: images [n, 64] with values from 0 to 16, and digits [n]."""

    seen: Images
    seen_digits: NDArray[np.int64]
    held_out: Images


Train = Callable[[Digits, Path], Any]
"""Trains, writes the model to the path, and returns its probabilities [n, 10] for the held-out images."""


@dataclass(frozen=True, slots=True)
class Framework:
    """`packages` have to be installed, by `extra`; `filename` is the model file's."""

    title: str
    name: str
    backend: str
    packages: tuple[str, ...]
    extra: str
    filename: str
    train: Train
    input: str = INPUT
    output: str = OUTPUT
    parameters: str = ""

    @property
    def target(self) -> Target:
        return Target(f"digits_{self.name}", self.input, self.output)

    def is_installed(self) -> bool:
        return all(find_spec(package) is not None for package in self.packages)

    def export(self, demo: Path) -> Export:
        """Where its model is, below the demo's folder."""
        return Export(demo / self.name, self.target.model, self.filename)

    def config(self) -> str:
        return (
            f'name: "{self.target.model}"\nbackend: "{self.backend}"\nmax_batch_size: {MOST_ROWS}\n'
            f'default_model_filename: "{self.filename}"\n'
            f'input [ {{ name: "{self.input}" data_type: TYPE_FP32 dims: [ 64 ] }} ]\n'
            f'output [ {{ name: "{self.output}" data_type: TYPE_FP32 dims: [ 10 ] }} ]\n'
            f"instance_group [ {{ kind: KIND_CPU count: 1 }} ]\ndynamic_batching {{ }}\n{self.parameters}"
        )


class TrainingError(Exception):
    """A framework is installed, and its training failed; the text has its output."""


def train_missing(frameworks: Sequence[Framework], demo: Path) -> list[Framework]:
    """Train those of the frameworks that were not trained before, and return them. TrainingError."""
    missing = [each for each in frameworks if not each.export(demo).folder.exists()]
    if missing:
        seen, seen_digits, held_out, _ = split_images()
        np.savez(demo / IMAGES, seen=seen, seen_digits=seen_digits, held_out=held_out)
    with ThreadPoolExecutor(TRAINED_AT_ONCE) as threads:
        for done in [threads.submit(_train_in_process, each, demo) for each in missing]:
            done.result()
    return missing


def outside(export: Export) -> Images:
    """Probabilities [n, 10] from the framework itself for the held-out images."""
    probabilities: Images = np.load(export.folder / OUTSIDE)
    return probabilities


def _train_in_process(framework: Framework, demo: Path) -> None:
    command = [sys.executable, "-m", "halimede.demo.frameworks", framework.name, str(demo)]
    # Threads that wait for one another would take longer than one thread of each training.
    environment = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"), "1")
    done = subprocess.run(  # noqa: S603 - this project's own command
        command, env=environment, capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode:
        raise TrainingError(f"the training with {framework.title} ended with {done.returncode}:\n{done.stderr[-3000:]}")


def _sklearn(digits: Digits, path: Path) -> Any:
    import joblib  # type: ignore[import-untyped]  # no types there
    from sklearn.ensemble import RandomForestClassifier  # type: ignore[import-untyped]  # no types there

    forest = RandomForestClassifier(50, random_state=SEED).fit(digits.seen, digits.seen_digits)
    joblib.dump(forest, path)
    return forest.predict_proba(digits.held_out)


def _xgboost(digits: Digits, path: Path) -> Any:
    import xgboost

    settings = {"objective": "multi:softprob", "num_class": 10, "max_depth": 4, "seed": SEED}
    booster = xgboost.train(settings, xgboost.DMatrix(digits.seen, digits.seen_digits), 50)
    booster.save_model(path)
    return booster.predict(xgboost.DMatrix(digits.held_out))


def _torch(digits: Digits, path: Path) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(SEED)
    layers = nn.Sequential(nn.BatchNorm1d(64), nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))
    seen, expected = torch.from_numpy(digits.seen), torch.from_numpy(digits.seen_digits)
    optimizer = torch.optim.Adam(layers.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(layers(seen), expected).backward()
        optimizer.step()
    classifier = nn.Sequential(layers, nn.Softmax(dim=1)).eval()
    images = torch.from_numpy(digits.held_out)
    # TorchScript, because a program of torch.export takes seven seconds more to load.
    torch.jit.trace(classifier, images[:2], check_trace=False).save(str(path))
    with torch.inference_mode():
        return classifier(images).numpy()


def _tensorflow(digits: Digits, path: Path) -> Any:
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    os.environ["ENABLE_RUNTIME_UPTIME_TELEMETRY"] = "0"
    import keras  # type: ignore[import-untyped]  # no types there

    keras.utils.set_random_seed(SEED)
    image = keras.Input((64,), name=INPUT)
    hidden = keras.layers.Dense(HIDDEN, "relu")(keras.layers.Rescaling(1 / 16)(image))
    model = keras.Model(image, {OUTPUT: keras.layers.Dense(10, "softmax", name=OUTPUT)(hidden)})
    model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy")
    model.fit(digits.seen, digits.seen_digits, batch_size=256, epochs=15, verbose=0)
    model.export(path, verbose=False)
    return model.predict(digits.held_out, verbose=0)[OUTPUT]


def _openvino(digits: Digits, path: Path) -> Any:
    """OpenVINO does not train: scikit-learn does, and its weights become a graph of OpenVINO."""
    from sklearn.neural_network import MLPClassifier  # type: ignore[import-untyped]  # no types there

    from halimede.backends.openvino.runtime import operations, runtime

    network = MLPClassifier((HIDDEN,), max_iter=30, learning_rate_init=0.01, n_iter_no_change=30, random_state=SEED)
    network.fit(digits.seen / 16, digits.seen_digits)
    openvino, ops = runtime(), operations()
    image = ops.parameter([-1, 64], openvino.Type.f32, name=INPUT)
    values = ops.divide(image, np.float32(16))
    for at, (weights, bias) in enumerate(zip(network.coefs_, network.intercepts_, strict=True)):
        values = ops.relu(values) if at else values
        values = ops.add(ops.matmul(values, np.float32(weights), False, False), np.float32(bias))
    probabilities = ops.softmax(values, 1)
    for tensor, name in ((image, INPUT), (probabilities, OUTPUT)):
        tensor.output(0).get_tensor().set_names({name})
    model = openvino.Model([probabilities], [image])
    openvino.save_model(model, path, compress_to_fp16=False)
    compiled = openvino.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return compiled(digits.held_out)[OUTPUT]


# Small operations of several threads wait for the slowest thread.
_ONE_THREAD = 'parameters { key: "INTRA_OP_THREAD_COUNT" value { string_value: "1" } }\n'

FRAMEWORKS = (
    Framework("scikit-learn", "sklearn", "sklearn", ("sklearn", "joblib"), "trees", "model.joblib", _sklearn),
    Framework(
        "XGBoost",
        "xgboost",
        "fil",
        ("xgboost", "treelite", "onnxruntime"),
        "trees",
        "xgboost.json",
        _xgboost,
        "input__0",
        "output__0",
        'parameters { key: "predict_proba" value { string_value: "true" } }\n',
    ),
    Framework(
        "PyTorch", "torch", "pytorch", ("torch",), "torch", "model.pt", _torch, "INPUT__0", "OUTPUT__0", _ONE_THREAD
    ),
    Framework(
        "TensorFlow", "tensorflow", "tensorflow", ("tensorflow", "keras"), "tensorflow", "model.savedmodel", _tensorflow
    ),
    Framework("OpenVINO", "openvino", "openvino", ("openvino",), "openvino", "model.xml", _openvino),
)


def main(name: str, demo: Path) -> None:
    (framework,) = (each for each in FRAMEWORKS if each.name == name)
    with np.load(demo / IMAGES) as arrays:
        digits = Digits(**arrays)
    with framework.export(demo).written(framework.config()) as partial:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            probabilities = framework.train(digits, partial.model)
        np.save(partial.folder / OUTSIDE, np.asarray(probabilities, dtype=np.float32))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
