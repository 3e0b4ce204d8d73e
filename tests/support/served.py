"""Python models in a real server, and its worker processes."""

import os
import shutil
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from support.calls import index, load, unload
from support.models import write_config
from support.server import RunningServer, wait_until

HEAD = r'''
import ctypes, json, os, signal, sys, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils


def value(request):
    """The first number of a request."""
    return float(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().ravel()[0])


def answer(request, **parameters):
    """The request's own numbers."""
    array = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)], parameters=parameters)


def note(what):
    """Write a line for the test; it is kept even if the process dies immediately."""
    file = os.open(NOTES, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(file, f"{what}\n".encode())
    os.close(file)


'''

ECHO = "return [answer(request) for request in requests]"
BATCHING = "dynamic_batching { max_queue_delay_microseconds: 100000 }"


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'


def add_python(
    repository: Path,
    name: str,
    execute: str = ECHO,
    *,
    methods: str = "",
    head: str = "",
    max_batch_size: int = 8,
    count: int = 1,
    datatype: str = "FP32",
    dims: str = "-1",
    decoupled: bool = False,
    extra: str = "",
    how: str = "def",
) -> None:
    """A model IN -> OUT with this code as its `execute`; `methods` is code of further methods. All may use `HEAD`.

    Its notes are in `notes_file`.
    """
    notes_file(repository, name).unlink(missing_ok=True)
    body = textwrap.indent(textwrap.dedent(execute).strip(), " " * 8)
    code = (
        f"{HEAD}NOTES = {str(notes_file(repository, name))!r}\n{textwrap.dedent(head)}\n\n\nclass TritonPythonModel:\n"
        f"{textwrap.indent(textwrap.dedent(methods), ' ' * 4)}\n    {how} execute(self, requests):\n{body}\n"
    )
    write_model(repository, name, code)
    kind = "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"
    write_config(
        repository / name,
        f"""
        name: "{name}"
        backend: "python"
        max_batch_size: {max_batch_size}
        input [ {{ name: "IN" data_type: {kind} dims: [ {dims} ] }} ]
        output [ {{ name: "OUT" data_type: {kind} dims: [ {dims} ] }} ]
        instance_group [ {{ kind: KIND_CPU count: {count} }} ]
        {"model_transaction_policy { decoupled: true }" if decoupled else ""}
        {extra}
        """,
    )


def write_model(repository: Path, name: str, code: str, version: int = 1) -> None:
    """Write model.py, or replace one, even if it was written in the same second."""
    folder = repository / name / str(version)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.py").write_text(code)


def notes_file(repository: Path, name: str) -> Path:
    return repository.parent / f"{name}.notes"


@dataclass
class Stage:
    """A server with explicit model control. Each test loads models with names of its own.

    A test's models are those that it adds here, and all further ones that it writes into the repository. The server's
    index keeps the versions of unloaded models: a test that reads them has models with names that no other test has.
    """

    server: RunningServer
    repository: Path
    names: list[str] = field(default_factory=list)
    kept: frozenset[str] = field(init=False)
    """The models of all tests: they were in the repository from the start."""

    def __post_init__(self) -> None:
        self.kept = frozenset(folder.name for folder in self.repository.iterdir())

    def deploy(self, name: str, execute: str = ECHO, **how: object) -> None:
        """`add_python`, and load it."""
        self.add(name, execute, **how)
        assert load(self.server, name) == (200, "")

    def add(self, name: str, execute: str = ECHO, **how: object) -> None:
        """`add_python`; `clear` unloads it."""
        add_python(self.repository, name, execute, **how)  # type: ignore[arg-type]
        self.names.append(name)

    def notes(self, name: str) -> list[str]:
        path = notes_file(self.repository, name)
        # A line is one write, but the reader may see a part of it if the model dies.
        return path.read_text().splitlines() if path.exists() else []

    def index(self) -> dict[tuple[str, str], tuple[str, str]]:
        """State and reason by name and version, of the models in the repository that are not `kept`."""
        there = {folder.name for folder in self.repository.iterdir()} - self.kept
        return {entry: state for entry, state in index(self.server).items() if entry[0] in there}

    def clear(self) -> None:
        """Unload all models of the test, wait until they and their processes are gone, and delete their files."""
        others = {folder.name for folder in self.repository.iterdir()} - self.kept - set(self.names)
        names = [*self.names, *sorted(others)]
        for name in names:
            unload(self.server, name)
        for name in names:
            wait_until(lambda name=name: not is_loaded(self.server, name), f"the end of {name}", self.server)
            wait_until(lambda name=name: not workers(self.server, name), f"no process of {name}", self.server)
            if (path := self.repository / name).is_symlink():
                path.unlink()
            elif path.exists():
                shutil.rmtree(path)
        self.names.clear()


def is_loaded(server: RunningServer, model: str) -> bool:
    return any(name == model and state not in ("", "UNAVAILABLE") for (name, _), (state, _) in index(server).items())


def body(*values: float, batch: bool = True) -> dict[str, object]:
    """The body of an inference of one row over HTTP."""
    shape = [1, len(values)] if batch else [len(values)]
    return {"inputs": [{"name": "IN", "shape": shape, "datatype": "FP32", "data": list(values)}]}


def infer(server: RunningServer, model: str, *values: float) -> tuple[int, object]:
    """The status, and the numbers of OUT or the error."""
    answer = server.post(f"/v2/models/{model}/infer", body(*values or (1.0,)))
    return answer.status, answer.json["outputs"][0]["data"] if answer.status == 200 else answer.error  # type: ignore[index]


def zygote(server: RunningServer) -> psutil.Process:
    """The parent process of all workers, of models that have no runtime to preload."""
    (found,) = zygotes(server)
    return found


def zygotes(server: RunningServer) -> list[psutil.Process]:
    return [each for each in children(server.process.pid) if "processes.zygote:main" in " ".join(each.cmdline())]


def workers(server: RunningServer, model: str = "") -> list[psutil.Process]:
    """The workers of a model, or all, in the order of their instances. A model's name has at most 11 characters."""
    try:
        found = {each: each.name() for parent in zygotes(server) for each in children(parent.pid)}
    except psutil.NoSuchProcess:
        return workers(server, model)
    mine = [each for each, name in found.items() if not model or name.rpartition("_")[0].rpartition("_")[0] == model]
    return sorted(mine, key=found.__getitem__)


def children(pid: int) -> list[psutil.Process]:
    """The children, without zombies."""
    before, pids = None, _children(pid)
    # The kernel's list may lack a process if another one ends while it is read.
    while pids != before:
        before, pids = pids, _children(pid)
    found = []
    for child in pids:
        try:
            each = psutil.Process(child)
            if each.status() != psutil.STATUS_ZOMBIE:
                found.append(each)
        except psutil.NoSuchProcess:
            continue
    return found


def _children(pid: int) -> list[int]:
    """By the threads that started them; `Process.children` of psutil reads the parent of each process of the machine."""
    if not Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").exists():
        # A kernel without these files.
        return sorted(child.pid for child in psutil.Process(pid).children())
    found = []
    for thread in psutil.Process(pid).threads():
        with suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, Path(f"/proc/{pid}/task/{thread.id}/children").read_text().split())
    return sorted(found)


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def alive(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    return [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
