"""Read model files in a process of their own: what Treelite makes of a damaged file may crash or never end.

The process sends the forest as arrays, which are checked before they are used. `python -m` runs this module there.
"""

import os
import re
import resource
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import numpy as np

from halimede.backends.api import ModelSource
from halimede.backends.extras import install_extra
from halimede.backends.read_memory import read_memory, too_much_memory
from halimede.backends.trees.files import HEAD_SIZE, mismatch
from halimede.backends.trees.forest import Forest, checked, from_arrays, to_arrays
from halimede.core.types.error import clip, internal, invalid, unsupported

BASE_SECONDS, BYTES_PER_SECOND = 60, 1_000_000

_MISSING, _REFUSED, _NO_MEMORY = 3, 4, 5
"""Exit codes: a library is missing; the file was refused; the limit of memory was reached."""

_OUT_OF_MEMORY = ("bad_alloc", "cannot allocate memory", "Could not expand buffer")
"""In the errors of C++, of the dynamic linker, and of Treelite."""

_ORIGIN = re.compile(r"^\[[\d:]+\] \S+?:\d+: |^\S+\.(?:cc|h):\d+: ")


def read_file(
    path: Path, model_type: str, source: ModelSource, *, allow_unknown_field: bool, base_seconds: int = BASE_SECONDS
) -> Forest:
    """The forest in a file. INVALID_ARG if it is damaged, of another type, or needs too much memory; UNSUPPORTED
    without Treelite. Blocks."""
    model, memory = source.name, read_memory("fil", source, path)
    seconds = base_seconds + path.stat().st_size // BYTES_PER_SECOND
    # -P: the folder that the server was started in is not searched for modules.
    program = [sys.executable, "-P", "-m", __name__, str(path), model_type, str(int(allow_unknown_field))]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    with os.fdopen(os.memfd_create("forest"), "w+b") as answer:
        try:
            ended = subprocess.run(  # noqa: S603  # our own module
                [*program, str(seconds), str(memory)],
                stdin=subprocess.DEVNULL,
                stdout=answer,
                stderr=subprocess.PIPE,
                timeout=seconds + BASE_SECONDS,
                env=environment,
                check=False,
            )
            code, said = ended.returncode, ended.stderr[-4096:].decode(errors="replace").strip()
        except subprocess.TimeoutExpired:
            code, said = -signal.SIGKILL, ""
        if code and any(word in said for word in _OUT_OF_MEMORY):
            code = _NO_MEMORY
        about = f"model '{model}': {path.name} cannot be read as model_type '{model_type}'"
        match code:
            case 0:
                answer.seek(0)
                try:
                    with np.load(answer, allow_pickle=False) as arrays:
                        forest = from_arrays(dict(arrays))
                except (ValueError, KeyError, zipfile.BadZipFile) as error:
                    raise internal(f"{about}: the reader's answer is damaged: {error}") from error
                return checked(forest, model)
            case 3:
                raise unsupported(f"model '{model}': {said}; {install_extra('trees')}")
            case 4:
                reason = clip(said)
            case 5:
                raise too_much_memory("fil", source, path, memory)
            case _ if code in (-signal.SIGXCPU, -signal.SIGKILL):
                reason = f"the reader did not end within {seconds} s, or was killed for its memory"
            case _ if code < 0:
                reason = f"the reader crashed ({signal.Signals(-code).name}): the file is damaged"
            case _:
                reason = f"the reader ended with exit code {code}: {clip(said[-256:])}"
    raise invalid(f"{about}: {reason}{mismatch(model_type, read_head(path))}")


def read_head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(HEAD_SIZE)


def _main(path: str, model_type: str, allow_unknown_field: str, seconds: str, memory: str) -> int:
    # Libraries print to stdout; only the answer goes to the original one.
    answer = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        from halimede.backends.trees.read_forest import read_forest

        import_treelite()
    except ImportError as error:
        print(f"treelite cannot be imported ({error})", file=sys.stderr)
        return _MISSING
    limit_process(int(memory), int(seconds))
    try:
        forest = read_forest(Path(path), model_type, allow_unknown_field=allow_unknown_field == "1")
        with os.fdopen(answer, "wb") as file:
            np.savez(file, **to_arrays(forest))
    except MemoryError:
        return _NO_MEMORY
    except Exception as error:  # noqa: BLE001  # the text of any error is the answer
        print(_one_line(error), file=sys.stderr)
        return _REFUSED
    return 0


def import_treelite() -> None:
    """In the process that reads files. ImportError."""
    # The part that predicts imports scipy, half of the time in which the process starts. Here nothing is predicted.
    sys.modules.setdefault("treelite.gtil", ModuleType("treelite.gtil"))
    import treelite  # noqa: F401


def limit_process(memory_bytes: int, seconds: int) -> None:
    """Bound this process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes,) * 2)


def _one_line(error: Exception) -> str:
    text = " ".join(_ORIGIN.sub("", line) for line in str(error).splitlines() if not line.startswith("Stack trace"))
    return " ".join(text.split()) or type(error).__name__


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
