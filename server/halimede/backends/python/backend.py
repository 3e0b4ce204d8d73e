"""What the server asks of python models before it starts them; they are loaded and run by their worker processes."""

from pathlib import Path
from typing import NoReturn

from halimede.backends.api import ModelSource
from halimede.core.config.model_config import ModelConfig


class PythonBackend:
    """`backend: "python"`, whose models are each a `model.py` of their own, or a backend that is one `model.py` itself.

    `program` is that of such a backend (`<backend directory>/<name>/model.py`). It is run whatever a model's version
    directory has, as Triton does: a `model.py` there is data of the model's.
    """

    isolation = "process"

    def __init__(self, program: Path | None = None) -> None:
        self.program = program
        self.default_model_filename = "model.py" if program is None else ""

    def __repr__(self) -> str:
        return f"<PythonBackend {self.program or 'model.py'}>"

    def default_instance_count(self, kind: str) -> int:  # noqa: ARG002  # the interface's argument
        return 1

    def supports_gpu(self) -> bool:
        """Always: whether a model uses the GPU that its instance is given is its own affair."""
        return True

    def autocomplete(self, config: ModelConfig, source: ModelSource) -> NoReturn:
        raise RuntimeError(f"model '{source.name}': {config.backend} models are completed by a worker process")

    def load(self, config: ModelConfig, source: ModelSource) -> NoReturn:
        raise RuntimeError(f"model '{source.name}': {config.backend} models are loaded by a worker process")
