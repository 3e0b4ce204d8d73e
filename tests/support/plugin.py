"""Third-party backends for tests: a distribution with pip's layout, on the PYTHONPATH of a server process.

`install_backend` installs any source. `FaultyBackend` installs one whose models fail as their configuration specifies, and
record their calls: see `FAULTY`.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from support.models import write_config

PLAIN_BACKEND = '''
class PlainBackend:
    """Accepts every configuration unchanged; one instance by default. A backend adds `load`."""

    default_model_filename = ""
    isolation = "thread"

    def default_instance_count(self, kind):
        return 1

    def supports_gpu(self):
        return False

    def autocomplete(self, config, source):
        return config

'''
"""Source of a base class; put it before the source of a backend that derives from it."""

FAULTY = (
    '''
"""A backend whose models misbehave. Its models take these parameters; a step is load, create, run, close or close_model.

fault:<step>   what the step does: "hang" until the file `release` exists, "allocate <MiB>" and keep it, "exit <code>" of
               the whole process, "return <expression of inputs>" instead of the outputs (run only), else the name of an
               exception to raise
instance       the faulty instance (create, run, close); without it, all instances
release        path of the file that ends every hang
events         path of a file that gets a line when a step begins ("create m_0_1") and one when it ends ("created m_0_1")

Without a fault an output OUT<x> is the input IN<x>, of any type and shape.
"""
import os
import time

import numpy as np

HELD = []

'''
    + PLAIN_BACKEND
    + """
class FaultyBackend(PlainBackend):
    def load(self, config, source):
        return Model(config)


class Faults:
    def __init__(self, config):
        self.values = {key: value.string_value for key, value in config.parameters.items()}
        self.name = config.name

    def step(self, step, done, instance=""):
        self.note(step, instance)
        wanted = self.values.get("fault:" + step, "")
        if wanted and self.values.get("instance", instance) == instance or wanted and not instance:
            self.commit(wanted)
        self.note(done, instance)

    def note(self, what, instance):
        if path := self.values.get("events"):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.write(descriptor, f"{what} {instance or self.name}\\n".encode())
            os.close(descriptor)

    def commit(self, wanted):
        what, _, rest = wanted.partition(" ")
        if what == "hang":
            while not os.path.exists(self.values["release"]):
                time.sleep(0.01)
        elif what == "allocate":
            HELD.append(np.ones((int(rest) << 20) // 8))
        elif what == "exit":
            os._exit(int(rest))
        elif what != "return":
            raise {**vars(__import__("builtins"))}[what]("as the test wants it")


class Model:
    def __init__(self, config):
        self.faults = Faults(config)
        self.faults.step("load", "loaded")

    def create_instance(self, placement):
        return Instance(self.faults, placement.name)

    def close(self):
        self.faults.step("close_model", "closed_model")


class Instance:
    def __init__(self, faults, name):
        self.faults = faults
        self.name = name
        faults.step("create", "created", name)

    def run(self, inputs, outputs, context):
        self.faults.step("run", "ran", self.name)
        wanted = self.faults.values.get("fault:run", "")
        if wanted.startswith("return "):
            return eval(wanted.removeprefix("return "), {"np": np, "inputs": inputs})
        return {name: inputs["IN" + name.removeprefix("OUT")] for name in outputs}

    def close(self):
        self.faults.step("close", "closed", self.name)
"""
)


def install_backend(
    site: Path, name: str, source: str, class_name: str, *, group: str = "halimede.backends"
) -> dict[str, str]:
    """Install the source of one module as backend `name`, or as a plugin of another group.

    Returns the environment of a server process that uses it.
    """
    module = f"{name}_backend"
    info = site / f"{module}-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (site / f"{module}.py").write_text(source)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-backend\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}:{class_name}\n")
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{site}{os.pathsep}{before}" if before else str(site)}


@dataclass(frozen=True)
class FaultyBackend:
    """The backend `faulty`, installed below `directory`. `environment` is for the server process."""

    directory: Path
    environment: Mapping[str, str]

    @classmethod
    def install(cls, directory: Path) -> "FaultyBackend":
        return cls(directory, install_backend(directory / "site", "faulty", FAULTY, "FaultyBackend"))

    def add_model(
        self,
        repository: Path,
        name: str,
        *,
        faults: Mapping[str, str] | None = None,
        instance: str = "",
        instances: int = 1,
        extra: str = "",
    ) -> None:
        """A model IN FP32[4] -> OUT FP32[4], batches up to 8; `faults` by step."""
        parameters = {f"fault:{step}": what for step, what in (faults or {}).items()}
        parameters |= {"release": str(self._release(name)), "events": str(self._events(name))}
        if instance:
            parameters["instance"] = instance
        lines = [
            f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in parameters.items()
        ]
        (repository / name / "1").mkdir(parents=True, exist_ok=True)
        write_config(
            repository / name,
            f"""
            name: "{name}"
            backend: "faulty"
            max_batch_size: 8
            input [ {{ name: "IN" data_type: TYPE_FP32 dims: [ 4 ] }} ]
            output [ {{ name: "OUT" data_type: TYPE_FP32 dims: [ 4 ] }} ]
            instance_group [ {{ kind: KIND_CPU count: {instances} }} ]
            {extra}
            """
            + "\n".join(lines),
        )

    def release(self, name: str) -> None:
        """End every hang of the model."""
        self._release(name).touch()

    def events(self, name: str) -> list[str]:
        """The calls of the model, in order: "load m", "loaded m", "create m_0_0", …"""
        path = self._events(name)
        return path.read_text().splitlines() if path.exists() else []

    def _release(self, name: str) -> Path:
        return self.directory / f"{name}.release"

    def _events(self, name: str) -> Path:
        return self.directory / f"{name}.events"
