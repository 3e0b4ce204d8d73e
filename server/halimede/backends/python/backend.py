"""The server's part of the python backend; worker processes load and run the models."""

from pathlib import Path
from typing import NoReturn

from halimede.backends.api import ModelSource
from halimede.core.config.model_config import ModelConfig


class PythonBackend:
    """`backend: "python"`, whose models each have a `model.py`, or a backend that is itself one `model.py`.

    `program` is that of such a backend (`<backend directory>/<name>/model.py`). As in Triton, the files in a
    model's version directory are data of the model, also a `model.py`.
    """

    isolation = "process"
    parameters = ("*",)  # a model's code may have any
    settings = ()

    def __init__(self, program: Path | None = None) -> None:
        self.program = program
        self.default_model_filename = "model.py" if program is None else ""

    def __repr__(self) -> str:
        return f"<PythonBackend {self.program or 'model.py'}>"

    def default_instance_count(self, kind: str) -> int:  # noqa: ARG002  # the interface's argument
        return 1

    def supports_gpu(self) -> bool:
        """Always true: the model itself decides whether it uses the GPU of its instance."""
        return True

    def autocomplete(self, config: ModelConfig, source: ModelSource) -> NoReturn:
        raise RuntimeError(f"model '{source.name}': {config.backend} models are completed by a worker process")

    def load(self, config: ModelConfig, source: ModelSource) -> NoReturn:
        raise RuntimeError(f"model '{source.name}': {config.backend} models are loaded by a worker process")
