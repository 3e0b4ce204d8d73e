"""The demo's model: a small neural network for handwritten digits of 8 by 8 pixels, exported to ONNX."""

import json

import numpy as np
from numpy.typing import NDArray

from halimede.demo.export import Export

MODEL = "digits"
REQUEST = "digit.json"
INPUT = "image"
OUTPUT = "probabilities"
LABELS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

CONFIG = f"""\
name: "{MODEL}"
backend: "onnxruntime"
max_batch_size: 64
input [ {{ name: "{INPUT}" data_type: TYPE_FP32 dims: [ 64 ] }} ]
output [ {{ name: "{OUTPUT}" data_type: TYPE_FP32 dims: [ 10 ] label_filename: "labels.txt" }} ]
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
dynamic_batching {{ }}
"""


def held_out_images(export: Export) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Images [n, 64] that were not used for training, and the digits [n] that they show."""
    with np.load(export.folder / "held_out.npz") as arrays:
        return arrays["images"], arrays["digits"]


def split_images() -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]:
    """scikit-learn's images [n, 64] and digits [n], for the training and held out of it; the same at each call."""
    # These imports take seconds.
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # no types there
    from sklearn.model_selection import train_test_split  # type: ignore[import-untyped]  # no types there

    images, digits = load_digits(return_X_y=True)
    seen, held_out, seen_digits, held_out_digits = train_test_split(
        images.astype(np.float32), digits.astype(np.int64), test_size=0.2, random_state=0, stratify=digits
    )
    return seen, seen_digits, held_out, held_out_digits


def train(export: Export) -> None:
    """Train, and write the model, the held-out images and a request for curl."""
    # These imports take seconds, and a second run does not need them.
    from skl2onnx import convert_sklearn  # type: ignore[import-untyped]  # no types there
    from skl2onnx.common.data_types import FloatTensorType  # type: ignore[import-untyped]  # no types there
    from sklearn.neural_network import MLPClassifier  # type: ignore[import-untyped]  # no types there
    from sklearn.pipeline import make_pipeline  # type: ignore[import-untyped]  # no types there
    from sklearn.preprocessing import StandardScaler  # type: ignore[import-untyped]  # no types there

    seen, seen_digits, held_out, held_out_digits = split_images()
    classifier = make_pipeline(StandardScaler(), MLPClassifier((256, 128), early_stopping=True, random_state=0))
    classifier.fit(seen, seen_digits)
    onnx_model = convert_sklearn(
        classifier,
        initial_types=[(INPUT, FloatTensorType([None, 64]))],
        options={id(classifier): {"zipmap": False}},
        target_opset=17,
    )

    with export.written(CONFIG) as partial:
        partial.model.write_bytes(onnx_model.SerializeToString())
        (partial.repository / MODEL / "labels.txt").write_text("\n".join(LABELS) + "\n")
        (partial.folder / REQUEST).write_text(json.dumps(curl_request(held_out[0])) + "\n")
        np.savez(partial.folder / "held_out.npz", images=held_out, digits=held_out_digits)


def curl_request(image: NDArray[np.float32]) -> dict[str, object]:
    """An inference request for one image that asks for the three most likely labels."""
    return {
        "inputs": [{"name": INPUT, "shape": [1, 64], "datatype": "FP32", "data": image.tolist()}],
        "outputs": [{"name": OUTPUT, "parameters": {"classification": 3}}],
    }


def answers_outside(export: Export, images: NDArray[np.float32]) -> NDArray[np.float32]:
    """Probabilities [n, 10] from ONNX Runtime in this process, without a server."""
    import onnxruntime  # type: ignore[import-untyped]  # no types there

    session = onnxruntime.InferenceSession(export.model, providers=["CPUExecutionProvider"])
    (probabilities,) = session.run([OUTPUT], {INPUT: images})
    return np.asarray(probabilities, dtype=np.float32)
