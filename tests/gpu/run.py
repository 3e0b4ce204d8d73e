"""Runs the tests on a GPU from the pack of `make gpu-pack`, without network: `tests/gpu/run.sh [pack] [--dry-run]`.

Needs nothing but the standard library, CPython 3.12 for the pack, and what `packing.THERE` names. Without a pack the
tests run with the packages of this Python. The results are a table, and JSON in the folder of `--out` or $OUT.
"""

import argparse
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu.progress import Limits, Progress, Result, Step, is_good, table

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PACK, SITE, RUN = (ROOT / "build" / name for name in ("gpu-pack", "gpu-site", "gpu-run"))
STAND_IN = ROOT / "build" / "gpu-stand-in"
FIRST = ("devices", "server", "pytorch", "python_dlpack", "throughput", "onnxruntime")
"""The order of the files, for the case that the time is not enough for all; the others follow."""

PYTHON = (3, 12)
PROBE_LIMIT_S = 90
POLL_S = 0.1
MOST_LIMIT_S = 450
"""Of the whole run by default: together with the end of the last test less than 8 minutes."""
LIMITS = {"test_s": 100.0, "start_s": 60.0}
END_LIMIT_S = 5
"""How long a process may take to end after SIGKILL: one that a driver blocks does not end."""
PR_SET_CHILD_SUBREAPER = 36
NO_GPU = 2
"""The exit code without a GPU."""

PLUGINS = ("xdist.plugin", "pytest_timeout", "gpu.plugin")
OPTIONS = ("-m", "gpu", "-o", "filterwarnings=default", "--disable-warnings", "-p", "no:cacheprovider", "--tb=short")
"""An unknown machine has warnings of its own, which must not fail a test."""


@dataclass(frozen=True, slots=True)
class Suite:
    """Files of tests, by their names in the folder."""

    folder: Path
    files: Sequence[str]


def suite() -> Suite:
    """The tests on a GPU, the most important first."""
    found = sorted(path.name.removeprefix("test_").removesuffix("_gpu.py") for path in HERE.glob("test_*_gpu.py"))
    ordered = [*(name for name in FIRST if name in found), *(name for name in found if name not in FIRST)]
    return Suite(ROOT, [f"tests/gpu/test_{name}_gpu.py" for name in ordered])


def unpack(wheels: Sequence[Path], site: Path) -> None:
    """Install wheels into a new folder. Programs and data files of packages are left out."""
    shutil.rmtree(site, ignore_errors=True)
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                folder, _, rest = member.partition("/")
                kind, _, inner = rest.partition("/")
                if folder.endswith(".data") and kind in ("purelib", "platlib"):
                    target = site / inner
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(archive.read(member))
                elif not folder.endswith(".data"):
                    archive.extract(member, site)


def environment_of(site: Path | None, device: str, events: Path) -> dict[str, str]:
    """The variables of the tests' processes. Installed plug-ins of pytest that nobody asked for are not loaded."""
    kept = {
        name: value for name, value in os.environ.items() if name not in ("PYTEST_ADDOPTS", "PYTHONDONTWRITEBYTECODE")
    }
    paths = [str(site) if site is not None else "", str(HERE.parent), kept.get("PYTHONPATH", "")]
    return kept | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "HALIMEDE_GPU_EVENTS": str(events),
        "HALIMEDE_GPU_TESTS": device,
        # The order of NVML, which the server has.
        "CUDA_DEVICE_ORDER": os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
    }


@dataclass(frozen=True, slots=True)
class Site:
    """An interpreter, and a folder with packages that come before its own."""

    python: str
    packages: Path | None = None


class Events:
    """The whole lines that the plug-in has written since the last read."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(b"")
        self._path = path
        self._offset = 0

    def read(self) -> Iterator[Mapping[str, Any]]:
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file.read().splitlines(keepends=True):
                if line.endswith(b"\n"):
                    self._offset += len(line)
                    yield json.loads(line)


class Run:
    """The processes of a run. `write` may be called at any time."""

    def __init__(self, site: Site, device: str, out: Path, limits: Limits, suite: Suite) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._begun = time.monotonic()
        self.device, self.out = device, out
        self._limits = limits
        self._progress = Progress(suite.files, limits)
        self._events = Events(out / "events.jsonl")
        self._environment = environment_of(site.packages, device, out / "events.jsonl")
        self._python = site.python
        self.suite = suite
        self.machine: dict[str, Any] = {}

    @property
    def results(self) -> tuple[Result, ...]:
        return self._progress.results

    def probe(self) -> bool:
        """Read what the machine has; whether it has a GPU. The first import of PyTorch may take a minute."""
        command = [self._python, str(HERE / "probe.py")]
        with (self.out / "probe.log").open("wb") as errors:
            try:
                printed = subprocess.run(
                    command, env=self._environment, stdout=-1, stderr=errors, timeout=PROBE_LIMIT_S, check=False
                ).stdout
            except subprocess.TimeoutExpired as error:
                printed = error.stdout or b""
        for line in printed.splitlines():
            # Libraries may print too, and the last line may be cut.
            with suppress(ValueError):
                self.machine.update(json.loads(line))
        return bool(self.machine.get("devices"))

    def tests(self) -> None:
        """Run all tests, within the limits."""
        step = Step.START
        while step is Step.START:
            step = self._process()
            self.write()

    def write(self) -> None:
        """Write the results so far."""
        found = {"machine": self.machine, "results": [asdict(each) for each in self.results]}
        found["is_good"] = is_good(self.results)
        (self.out / "results.json").write_text(json.dumps(found, indent=1) + "\n")

    def _process(self) -> Step:
        """One process of pytest, to its end."""
        arguments = self._progress.arguments
        plugins = [f"-p{name}" for name in PLUGINS]
        # Within the process first: then the others of its tests need no new process.
        limit = f"--timeout={self._limits.test_s * 0.9:g}"
        command = [self._python, "-m", "pytest", *plugins, *OPTIONS, limit, *arguments]
        log = self.out / f"{Path(arguments[0].partition('::')[0]).stem}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                cwd=self.suite.folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self._progress.started(self._now_s())
        try:
            while process.poll() is None:
                self._read()
                if self._progress.step(self._now_s()) is Step.KILL:
                    break
                with suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_S)
        finally:
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_LIMIT_S)
            end_orphans()
            self._read()
        code = process.poll()
        how = "no end after SIGKILL" if code is None else f"exit code {code}" if code >= 0 else f"signal {-code}"
        return self._progress.ended(how, self._now_s())

    def _read(self) -> None:
        for event in self._events.read():
            if "end" in event:
                print(
                    f"{self._now_s():5.0f} s  {event['outcome']:8} {event['end'].removeprefix('tests/gpu/')}",
                    flush=True,
                )
            self._progress.event(event, self._now_s())

    def _now_s(self) -> float:
        return time.monotonic() - self._begun


def adopt_orphans() -> None:
    """Make this process the parent of all processes below it whose parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_orphans() -> None:
    """Kill what a killed test has left: servers and their workers, which hold memory of the GPU."""
    until = time.monotonic() + END_LIMIT_S
    while (pids := children()) and time.monotonic() < until:
        for pid in pids:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(POLL_S / 10)


def children() -> list[int]:
    """The processes whose parent is this one. Not every kernel has a file with them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The name, in parentheses, may have any characters.
            parent = path.read_text(errors="replace").rpartition(")")[2].split()[1]
            if int(parent) == os.getpid():
                found.append(int(path.parent.name))
    return found


def find_python(wanted: tuple[int, int] = PYTHON) -> str | None:
    """An interpreter of this version: in PATH, of pyenv or of uv."""
    name = f"python{wanted[0]}.{wanted[1]}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [shutil.which(name), *map(str, sorted(pyenv.glob(f"{wanted[0]}.{wanted[1]}.*/bin/python")))]
    if uv := shutil.which("uv"):
        command = [uv, "python", "find", "--no-python-downloads", f"{wanted[0]}.{wanted[1]}"]
        found.append(subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip())
    return next((each for each in found if each and version_of(each) == wanted), None)


def version_of(python: str) -> tuple[int, int] | None:
    """None if it cannot be run."""
    code = "import sys; print(*sys.version_info[:2])"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=20, check=False)
        major, minor = map(int, done.stdout.split())
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return major, minor


def make_pack(*, stand_in: bool) -> None:
    """Make the pack, and say its size; with `stand_in` also wheels of what the machine has."""
    from gpu import packing

    try:
        print(packing.pack(print).check())
        if stand_in:
            packing.pack_stand_in()
    except packing.PackError as error:
        sys.exit(f"error: {error}")


def dry_run_sites() -> dict[str, Site]:
    """Interpreters and packages of a dry run, by name: a bare Python with the pack, and this one, which has PyTorch."""
    make_pack(stand_in=True)
    here = {"here": Site(sys.executable)}
    python = find_python()
    if python is None:
        print("No Python 3.12 is here: the pack is not tried")
        return here
    unpack([*PACK.glob("*.whl"), *STAND_IN.glob("*.whl")], SITE)
    code = "import halimede.app; print('Imported', halimede.app.__file__)"
    subprocess.run([python, "-c", code], env=os.environ | {"PYTHONPATH": str(SITE)}, cwd=SITE, check=True)
    return {"pack": Site(python, SITE), **here}


def run_site() -> Site:
    """The interpreter and packages of a run."""
    wheels = [*PACK.glob("*.whl")]
    if not wheels:
        print("There is no pack in build/gpu-pack: the tests run with the packages of this Python")
        return Site(sys.executable)
    if sys.version_info[:2] != PYTHON:
        sys.exit(f"error: the pack is for Python 3.12, and {sys.executable} is {sys.version.split()[0]}; set PYTHON")
    unpack(wheels, SITE)
    return Site(sys.executable, SITE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=["pack", "run"], default="run", help="pack needs the network")
    parser.add_argument(
        "--dry-run", action="store_true", help="make the pack, and run the tests on a CPU where they can"
    )
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT") or RUN, help="the folder of the results")
    parser.add_argument("--limit", type=float, default=MOST_LIMIT_S, metavar="SECONDS", help="of the whole run")
    options = parser.parse_args()
    if options.command == "pack":
        make_pack(stand_in=False)
        return
    out = options.out.resolve()
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    limits = Limits(**LIMITS, whole_s=options.limit)
    if not options.dry_run:
        sys.exit(execute(Run(run_site(), "gpu", out, limits, suite())))
    sites = dry_run_sites()
    codes = [execute(Run(site, "cpu", out / name, limits, suite())) for name, site in sites.items()]
    sys.exit(max(codes))


def execute(run: Run) -> int:
    """Run the tests and print the table, even if something ends this process. Returns the exit code."""
    has_gpu = run.probe()
    print("\n".join(f"{name}: {value}" for name, value in run.machine.items()), flush=True)
    if run.device == "gpu" and not has_gpu:
        run.write()
        print(f"No GPU is here. Skipped: {', '.join(run.suite.files)}")
        return NO_GPU
    try:
        run.tests()
    finally:
        run.write()
        print(f"\n{table(run.results)}\n{run.out / 'results.json'}\n", flush=True)
    return 0 if is_good(run.results) else 1


if __name__ == "__main__":
    main()
