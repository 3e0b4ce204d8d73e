"""The demo's pipelines, asked with files of pictures, and what the same three steps make of them in this process.

`read_digits` is an ensemble, `read_digits_bls` python code that calls the same models; `spell` streams its answers.
"""

import json
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from halimede.demo.digits import LABELS, Export, answers_outside
from halimede.demo.drive import PATIENCE_S

ENSEMBLE, BLS, SPELL = "read_digits", "read_digits_bls", "spell"
ENLARGED = 8
"""Pixels of a picture for each of the data set's."""

TOLERANCE = 1e-4
_EVENT = b"data: "


@dataclass(frozen=True, slots=True)
class Reading:
    """The word for each file, how likely it is, and how long all of them took together."""

    words: list[str]
    confidences: NDArray[np.float32]
    seconds: float


def as_png(image: NDArray[np.float32]) -> bytes:
    """One of the data set's images, [64] from 0 to 16, as a PNG file that is larger."""
    import cv2

    grey = np.round(image.reshape(8, 8) * (255 / 16)).astype(np.uint8)
    is_made, file = cv2.imencode(".png", np.kron(grey, np.ones((ENLARGED, ENLARGED), np.uint8)))
    if not is_made:
        raise ValueError("opencv makes no PNG file of an image")
    return file.tobytes()


def read(address: str, model: str, files: Sequence[bytes]) -> Reading:
    """Ask a pipeline over HTTP for all files in one request."""
    import tritonclient.http as client  # type: ignore[import-untyped]  # no types there

    tensor = client.InferInput("FILE", [len(files), 1], "BYTES")
    tensor.set_data_from_numpy(np.array(files, np.object_).reshape(-1, 1))
    with closing(client.InferenceServerClient(address, network_timeout=PATIENCE_S)) as server:
        begun_s = time.perf_counter()
        result = server.infer(model, [tensor])
        words = [word.decode() for word in result.as_numpy("WORD").ravel()]
        return Reading(words, result.as_numpy("CONFIDENCE").ravel(), time.perf_counter() - begun_s)


def read_outside(export: Export, files: Sequence[bytes]) -> Reading:
    """The same steps with opencv and ONNX Runtime in this process."""
    import cv2

    begun_s = time.perf_counter()
    images = np.empty((len(files), 64), np.float32)
    for row, file in enumerate(files):
        picture = cv2.imdecode(np.frombuffer(file, np.uint8), cv2.IMREAD_GRAYSCALE)
        if picture is None:
            raise ValueError(f"file {row} is no image")
        images[row] = cv2.resize(picture, (8, 8), interpolation=cv2.INTER_AREA).ravel() * np.float32(16 / 255)
    probabilities = answers_outside(export, images)
    words = [LABELS[digit] for digit in probabilities.argmax(axis=1)]
    return Reading(words, probabilities.max(axis=1), time.perf_counter() - begun_s)


def are_equal(reading: Reading, outside: Reading) -> bool:
    """Whether both say the same words, equally likely."""
    return reading.words == outside.words and np.allclose(
        reading.confidences, outside.confidences, rtol=0, atol=TOLERANCE
    )


def spell(address: str, number: str) -> Iterator[str]:
    """The words that `spell` sends, as they come, as server-sent events."""
    body = json.dumps({"number": number}).encode()
    url = f"http://{address}/v2/models/{SPELL}/generate_stream"
    with urllib.request.urlopen(url, body, timeout=PATIENCE_S) as answer:
        for line in answer:
            if line.startswith(_EVENT):
                yield str(json.loads(line.removeprefix(_EVENT))["word"])
