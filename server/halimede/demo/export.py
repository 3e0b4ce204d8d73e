"""A directory with a model that the demo has trained: a repository with the ONNX model, and data for requests."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Export:
    folder: Path
    name: str

    @property
    def repository(self) -> Path:
        return self.folder / "models"

    @property
    def model(self) -> Path:
        return self.repository / self.name / "1" / "model.onnx"

    @contextmanager
    def written(self, model: bytes, config: str) -> Iterator["Export"]:
        """Write the model; the caller's block adds files to the export that it gets.

        `folder` appears only when it is complete.
        """
        partial = Export(self.folder.with_name(f"{self.folder.name}.partial"), self.name)
        shutil.rmtree(partial.folder, ignore_errors=True)
        partial.model.parent.mkdir(parents=True)
        partial.model.write_bytes(model)
        (partial.repository / self.name / "config.pbtxt").write_text(config)
        yield partial
        partial.folder.rename(self.folder)
