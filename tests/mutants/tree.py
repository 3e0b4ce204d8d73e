"""A copy of the repository with an environment of its own: no checkout is ever mutated."""

import fcntl
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from mutants.apply import Position, apply
from mutants.find import Mutant

ROOT = Path(__file__).parents[2]
PACKAGES = ("server/halimede", "operator/halimede_operator")
GENERATED = ("/demo/", "/protocol/")


class Tree:
    """`folder/tree` is the copy; what is found out about it is beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "tree"
        self.lock: IO[str] | None = None
        self.python = self.root / ".venv" / "bin" / "python"

    @classmethod
    def of_commit(cls, commit: str, parent: Path) -> "Tree":
        """The copy of a commit, which is made unless it is there. Only one process has it."""
        full = full_name(commit)
        tree = cls(folder_of(commit, parent))
        tree.folder.mkdir(parents=True, exist_ok=True)
        tree.lock = (tree.folder / "lock").open("w")
        fcntl.flock(tree.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not (tree.folder / "complete").exists():
            shutil.rmtree(tree.root, ignore_errors=True)
            for command in (
                ["clone", "--quiet", "--no-checkout", str(ROOT), "tree"],
                ["-C", "tree", "checkout", "-q", full],
            ):
                subprocess.run(["git", *command], cwd=tree.folder, check=True)
            subprocess.run(["make", ".venv"], cwd=tree.root, check=True)
            (tree.folder / "complete").touch()
        subprocess.run(["git", "checkout", "-q", "--", "."], cwd=tree.root, check=True)
        [packages] = (tree.root / ".venv" / "lib").glob("python*/site-packages")
        shutil.copy(Path(__file__).with_name("watch.py"), packages / "mutants_watch.py")
        return tree

    def sources(self) -> dict[str, str]:
        """Texts of the product's files, by path."""
        files = [file for package in PACKAGES for file in (self.root / package).rglob("*.py")]
        texts = {str(file.relative_to(self.root)): file.read_text() for file in sorted(files)}
        return {name: text for name, text in texts.items() if not any(part in name for part in GENERATED)}

    @contextmanager
    def changed(self, texts: dict[str, str]) -> Iterator[None]:
        """The tree with other texts of some files."""
        kept = {name: (self.root / name).read_text() for name in texts}
        try:
            self._write(texts)
            yield
        finally:
            self._write(kept)

    def _write(self, texts: dict[str, str]) -> None:
        for name, text in texts.items():
            path = self.root / name
            path.write_text(text)
            # Python compiles a file again if its size or the second of its time differs: of two mutants neither may.
            for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
                compiled.unlink()

    @contextmanager
    def mutated(self, mutant: Mutant, position: Position) -> Iterator[None]:
        with self.changed({position.file: self.mutated_text(mutant, position)}):
            yield

    def mutated_text(self, mutant: Mutant, position: Position) -> str:
        return apply(mutant, (self.root / position.file).read_text(), position.line)

    def imports(self, module: str) -> bool:
        done = subprocess.run(
            [str(self.python), "-c", f"import {module}"], capture_output=True, check=False, timeout=120
        )
        return done.returncode == 0


def full_name(commit: str) -> str:
    return subprocess.check_output(["git", "rev-parse", commit], cwd=ROOT, text=True).strip()


def folder_of(commit: str, parent: Path) -> Path:
    """Where the copy of a commit is, and what was found out about it."""
    return parent / full_name(commit)[:12]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
