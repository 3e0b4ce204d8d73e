"""A real Prometheus: Debian's package, unpacked into the cache once, and servers on free ports of this machine."""

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster.programs import cache
from support.image import Unavailable, attempt
from support.phases import only_one, phase
from support.ports import free_port

PROGRAMS = ("prometheus", "promtool")
START_LIMIT_S = 60
STOP_LIMIT_S = 30
REQUEST_LIMIT_S = 30


def provide_prometheus() -> Path:
    """The folder with `prometheus` and `promtool`: that of the PATH, or one of the cache. Raises Unavailable."""
    found = {program: shutil.which(program) for program in PROGRAMS}
    if (installed := found["prometheus"]) and found["promtool"]:
        return Path(installed).parent
    folder = cache().with_name("prometheus")
    with only_one(folder.with_suffix(".lock"), "Debian's package of Prometheus"):
        if not folder.exists():
            _unpack(folder)
    return folder


def _unpack(folder: Path) -> None:
    """Download the package and keep its programs. Installing it would start a service and need root."""
    if shutil.which("apt-get") is None:
        raise Unavailable("Prometheus is neither installed nor can it be downloaded: apt-get does not exist")
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with phase("Downloading Debian's package of Prometheus"):
        if _download(partial).returncode:
            # The lists of packages may be missing or outdated.
            attempt("apt-get", "--quiet", "--option", "DPkg::Lock::Timeout=120", "update")
            if (done := _download(partial)).returncode:
                raise Unavailable(f"apt-get download prometheus: {done.stderr[-500:]}")
        (package,) = partial.glob("*.deb")
        if (done := attempt("dpkg-deb", "--extract", package, partial / "root")).returncode:
            raise Unavailable(f"dpkg-deb --extract {package.name}: {done.stderr[-500:]}")
    programs = partial / "programs"
    programs.mkdir()
    for program in PROGRAMS:
        (partial / "root" / "usr" / "bin" / program).rename(programs / program)
    programs.rename(folder)
    shutil.rmtree(partial)


def _download(folder: Path) -> subprocess.CompletedProcess[str]:
    return attempt("sh", "-c", 'cd "$1" && apt-get --quiet download prometheus', "sh", folder)


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running server."""

    url: str
    """Without a slash at the end."""
    process: subprocess.Popen[bytes]

    def get(self, path: str, query: Mapping[str, str] | None = None) -> Any:
        """The member `data` of an answer of the HTTP API. path: below /api/v1/. Raises AssertionError with the error."""
        address = f"{self.url}/api/v1/{path}" + (f"?{urllib.parse.urlencode(query)}" if query else "")
        try:
            with urllib.request.urlopen(address, timeout=REQUEST_LIMIT_S) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{address}: {error.code} {error.read()[:2000]!r}") from error

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The result of an instant query, of a vector: [{"metric": {label: value}, "value": [seconds, text]}]."""
        result = self.get("query", {"query": expression})["result"]
        assert isinstance(result, list)
        return result

    def reload(self) -> None:
        """Read the configuration again; `start_prometheus` wrote it to prometheus.yml of its folder."""
        request = urllib.request.Request(f"{self.url}/-/reload", method="POST")
        with urllib.request.urlopen(request, timeout=REQUEST_LIMIT_S):
            pass


@contextmanager
def start_prometheus(configuration: Mapping[str, Any], folder: Path) -> Iterator[Prometheus]:
    """A server with this configuration, ready for queries; it ends with the block.

    folder: for the configuration (prometheus.yml), the data and the log (prometheus.log); exists. Other files that the
    configuration names, such as rules, are relative to it. Raises Unavailable where there are no programs.
    """
    program = provide_prometheus() / "prometheus"
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(dict(configuration), sort_keys=False))
    port = free_port()
    command = [
        program,
        f"--config.file={file}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--web.enable-lifecycle",
    ]
    log = folder / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    server = Prometheus(f"http://127.0.0.1:{port}", process)
    try:
        _wait_until_ready(server, log)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(server: Prometheus, log: Path) -> None:
    give_up_at = time.monotonic() + START_LIMIT_S
    while time.monotonic() < give_up_at:
        assert server.process.poll() is None, f"prometheus ended: {log.read_text()[-4000:]}"
        try:
            with urllib.request.urlopen(f"{server.url}/-/ready", timeout=REQUEST_LIMIT_S):
                return
        except OSError:
            time.sleep(0.05)
    raise AssertionError(f"prometheus is not ready after {START_LIMIT_S} s: {log.read_text()[-4000:]}")
