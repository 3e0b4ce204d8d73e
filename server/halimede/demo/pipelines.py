"""Query the demo's pipelines with image files, and compute the same three steps in this process.

`read_digits` is an ensemble, `read_digits_bls` is python code that calls the same models; `spell` streams its
responses.
"""

import json
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from halimede.demo.digits import LABELS, answers_outside
from halimede.demo.drive import REQUEST_TIMEOUT_S
from halimede.demo.export import Export

ENSEMBLE, BLS, SPELL = "read_digits", "read_digits_bls", "spell"
ENLARGED = 8
"""Size in image pixels of one pixel of the data set."""

TOLERANCE = 1e-4
_EVENT = b"data: "


@dataclass(frozen=True, slots=True)
class Reading:
    """The word for each file, its probability, and the time for all files together."""

    words: list[str]
    confidences: NDArray[np.float32]
    seconds: float


def as_png(image: NDArray[np.float32]) -> bytes:
    """One image of the data set, [64] from 0 to 16, as an enlarged PNG file."""
    import cv2

    grey = np.round(image.reshape(8, 8) * (255 / 16)).astype(np.uint8)
    is_made, file = cv2.imencode(".png", np.kron(grey, np.ones((ENLARGED, ENLARGED), np.uint8)))
    if not is_made:
        raise ValueError("opencv makes no PNG file of an image")
    return file.tobytes()


def read(address: str, model: str, files: Sequence[bytes]) -> Reading:
    """Send all files to a pipeline in one request over HTTP."""
    import tritonclient.http as client  # type: ignore[import-untyped]  # no types there

    tensor = client.InferInput("FILE", [len(files), 1], "BYTES")
    tensor.set_data_from_numpy(np.array(files, np.object_).reshape(-1, 1))
    with closing(client.InferenceServerClient(address, network_timeout=REQUEST_TIMEOUT_S)) as server:
        begun_s = time.perf_counter()
        result = server.infer(model, [tensor])
        words = [word.decode() for word in result.as_numpy("WORD").ravel()]
        return Reading(words, result.as_numpy("CONFIDENCE").ravel(), time.perf_counter() - begun_s)


def read_outside(export: Export, files: Sequence[bytes]) -> Reading:
    """The same steps, computed with opencv and ONNX Runtime in this process."""
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
    """Whether both have the same words, with equal probabilities."""
    return reading.words == outside.words and np.allclose(
        reading.confidences, outside.confidences, rtol=0, atol=TOLERANCE
    )


def spell(address: str, number: str) -> Iterator[str]:
    """The words that `spell` streams, as they arrive as server-sent events."""
    body = json.dumps({"number": number}).encode()
    url = f"http://{address}/v2/models/{SPELL}/generate_stream"
    with urllib.request.urlopen(url, body, timeout=REQUEST_TIMEOUT_S) as answer:
        for line in answer:
            if line.startswith(_EVENT):
                yield str(json.loads(line.removeprefix(_EVENT))["word"])
