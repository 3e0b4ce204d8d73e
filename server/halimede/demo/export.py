"""A directory with a model that the demo has trained: a repository with the model, and data for requests."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Export:
    folder: Path
    name: str
    filename: str = "model.onnx"

    @property
    def repository(self) -> Path:
        return self.folder / "models"

    @property
    def model(self) -> Path:
        return self.repository / self.name / "1" / self.filename

    @contextmanager
    def written(self, config: str) -> Iterator["Export"]:
        """Write the configuration; the caller's block adds the model and other files to the export that it gets.

        `folder` appears only when it is complete.
        """
        partial = replace(self, folder=self.folder.with_name(f"{self.folder.name}.partial"))
        shutil.rmtree(partial.folder, ignore_errors=True)
        partial.model.parent.mkdir(parents=True)
        (partial.repository / self.name / "config.pbtxt").write_text(config)
        yield partial
        partial.folder.rename(self.folder)
