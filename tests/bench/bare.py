"""A bare loop of batches in a process of its own: `python bare.py FRAMEWORK MODEL_FILE`.

It finds the size of model that takes TARGET_MS for a full batch, writes the model, and prints that size and time. Then it
reads lines of JSON, executions by batch size, and prints the seconds that it took for them.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import frameworks

TARGET_MS = 7.0
LEAST_MS, MOST_MS = 5.5, 9.0
"""Within the 5 to 10 ms of the goal also when the machine's speed changes a little."""
TRIES = 4
RUNS = 25
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class Bare:
    """A bare loop: `size` and `batch_ms` are those of its model. Ends with the `with` block."""

    def __init__(self, framework: str, model: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, framework, str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # As the server does it for its worker processes.
            env=os.environ | dict.fromkeys(THREADS, "1"),
        )
        found = self._line()
        self.size, self.batch_ms = int(found[0]), found[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def seconds(self, batches: Mapping[int, int]) -> float:
        """For these batches: executions by batch size."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(batches) + "\n")
        self._process.stdin.flush()
        return self._line()[0]

    def _line(self) -> list[float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the bare loop ended with {self._process.wait()}: {self._process.args}")
        found: list[float] = json.loads(line)
        return found


def batch_ms(framework: frameworks.Framework, call: frameworks.Call) -> float:
    """Milliseconds of a full batch that nothing disturbs: the least of several."""
    x = framework.inputs(framework.batch)
    call(x)
    taken = []
    for _ in range(RUNS):
        start = time.perf_counter()
        call(x)
        taken.append(time.perf_counter() - start)
    return min(taken) * 1000


def sized(framework: frameworks.Framework, path: Path) -> tuple[frameworks.Call, int, float]:
    """Write the model with the size that takes about TARGET_MS for a full batch; its call, size and time.

    The last try counts even if the machine is so busy that none is between LEAST_MS and MOST_MS.
    """
    size = framework.first_size
    for attempt in range(TRIES):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        framework.write(size, path)
        call = framework.open(path)
        taken_ms = batch_ms(framework, call)
        if LEAST_MS <= taken_ms <= MOST_MS or attempt == TRIES - 1:
            break
        size = max(1, round(size * TARGET_MS / taken_ms))
    return call, size, taken_ms


def main(name: str, path: str) -> None:
    # Libraries print to stdout; only the answers go to the original one.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    framework = frameworks.FRAMEWORKS[name]
    call, size, taken_ms = sized(framework, Path(path))
    print(json.dumps([size, taken_ms]), file=answers, flush=True)
    for line in sys.stdin:
        batches = {int(rows): count for rows, count in json.loads(line).items()}
        given = {rows: framework.inputs(rows) for rows in batches}
        for x in given.values():
            call(x)
        start = time.perf_counter()
        for rows, count in batches.items():
            x = given[rows]
            for _ in range(count):
                call(x)
        print(json.dumps([time.perf_counter() - start]), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
