"""Query the demo's python models with two photographs, and compute the same with opencv in this process.

The models are in `models/`, written as for Triton: `photos` decodes JPEG files to pixels, `sketch` streams a photograph
row by row.
"""

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halimede.demo.drive import REQUEST_TIMEOUT_S

REPOSITORY = Path(__file__).parent / "models"
PHOTOS, SKETCH = "photos", "sketch"
INSTANCE = "photos_0_0"
COLUMNS = 64

Pixels = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Photo:
    """A JPEG file."""

    name: str
    jpeg: bytes


@dataclass(frozen=True, slots=True)
class Timed:
    """Pixels, or one row of them, and their arrival time: seconds since the request was sent."""

    pixels: Pixels
    seconds: float


def sample_photos() -> list[Photo]:
    """The photographs that come with scikit-learn."""
    # From its list of files, because importing it takes more than a second.
    folder = Path(str(distribution("scikit-learn").locate_file("sklearn/datasets/images")))
    return [Photo(path.name, path.read_bytes()) for path in sorted(folder.glob("*.jpg"))]


def ask_pixels(address: str, photo: Photo) -> Timed:
    """The photograph as decoded and resized by `photos`, [224, 224, 3], requested over HTTP."""
    import tritonclient.http as client  # type: ignore[import-untyped]  # no types there

    with closing(client.InferenceServerClient(address, network_timeout=REQUEST_TIMEOUT_S)) as server:
        begun_s = time.perf_counter()
        result = server.infer(PHOTOS, [jpeg_input(client, photo, [1, 1])])
        (pixels,) = result.as_numpy("PIXELS")
        return Timed(pixels, time.perf_counter() - begun_s)


def stream_rows(address: str, photo: Photo) -> Iterator[Timed]:
    """The rows, [64, 3] each, that `sketch` sends for the photograph, as they arrive on a gRPC stream."""
    import tritonclient.grpc as client  # type: ignore[import-untyped]  # no types there

    answers: SimpleQueue[tuple[Any, Exception | None]] = SimpleQueue()
    columns = client.InferInput("COLUMNS", [1], "INT32")
    columns.set_data_from_numpy(np.array([COLUMNS], np.int32))
    with closing(client.InferenceServerClient(address)) as server:
        server.start_stream(lambda result, error: answers.put((result, error)))
        begun_s = time.perf_counter()
        inputs = [jpeg_input(client, photo, [1]), columns]
        server.async_stream_infer(SKETCH, inputs, enable_empty_final_response=True)
        while True:
            result, error = answers.get(timeout=REQUEST_TIMEOUT_S)
            if error is not None:
                raise error
            if result.get_response().parameters["triton_final_response"].bool_param:
                return
            yield Timed(result.as_numpy("ROW"), time.perf_counter() - begun_s)


def jpeg_input(client: Any, photo: Photo, shape: list[int]) -> Any:
    """The file as an input of `tritonclient.http` or `tritonclient.grpc`."""
    tensor = client.InferInput("JPEG", shape, "BYTES")
    tensor.set_data_from_numpy(np.array([photo.jpeg], np.object_).reshape(shape))
    return tensor


def is_right(photo: Photo, pixels: Pixels) -> bool:
    """Whether these pixels [rows, columns, 3] equal those that opencv computes from the photograph in this process."""
    import cv2

    rows, columns, _ = pixels.shape
    decoded = cv2.imdecode(np.frombuffer(photo.jpeg, np.uint8), cv2.IMREAD_COLOR_RGB)
    if decoded is None:
        raise ValueError(f"{photo.name} is no image")
    return np.array_equal(pixels, cv2.resize(decoded, (columns, rows), interpolation=cv2.INTER_AREA))
