"""A real kube-apiserver with etcd on this machine, without controllers and nodes: schemas, rights and aggregation."""

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.pki import Authority, key_pair, write_kubeconfig
from support.ports import free_port

START_LIMIT_S = 120
STOP_LIMIT_S = 60


@dataclass
class ApiServer:
    url: str
    authority: Authority
    programs: Path
    kubeconfig: Path
    """Of an administrator."""

    def kubectl(self, *arguments: str, given: dict[str, Any] | None = None) -> str:
        """The output; an AssertionError with kubectl's words if it fails. given: on standard input."""
        done = subprocess.run(
            [self.programs / "kubectl", f"--kubeconfig={self.kubeconfig}", *arguments],
            input=json.dumps(given) if given is not None else "",
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{arguments}: {done.stderr}"
        return done.stdout

    def apply(self, given: dict[str, Any]) -> None:
        self.kubectl("apply", "--filename=-", given=given)


@contextmanager
def api_server(programs: Path, folder: Path) -> Iterator[ApiServer]:
    """programs: the folder with Kubernetes' programs. folder: for files; exists."""
    authority, front_proxy = Authority("ca"), Authority("front-proxy-ca")
    (folder / "ca.crt").write_bytes(authority.certificate)
    (folder / "front-proxy-ca.crt").write_bytes(front_proxy.certificate)
    authority.issue("kube-apiserver", "", "127.0.0.1", "localhost").write(folder / "apiserver")
    front_proxy.issue("front-proxy-client").write(folder / "front-proxy")
    for name, content in zip(("sa.key", "sa.pub"), key_pair(), strict=True):
        (folder / name).write_bytes(content)
    etcd, peers, port = free_port(), free_port(), free_port()
    server = ApiServer(
        url := f"https://127.0.0.1:{port}",
        authority,
        programs,
        write_kubeconfig(folder / "admin.conf", url, authority.certificate, authority.issue("admin", "system:masters")),
    )
    with ExitStack() as stack:
        stack.enter_context(
            _running(
                folder / "etcd.log",
                *(programs / "etcd", f"--data-dir={folder / 'etcd'}", "--unsafe-no-fsync"),
                *(f"--{kind}-client-urls=http://127.0.0.1:{etcd}" for kind in ("listen", "advertise")),
                f"--listen-peer-urls=http://127.0.0.1:{peers}",
                f"--initial-advertise-peer-urls=http://127.0.0.1:{peers}",
                f"--initial-cluster=default=http://127.0.0.1:{peers}",
            )
        )
        log = folder / "apiserver.log"
        process = stack.enter_context(
            _running(
                log,
                *(programs / "kube-apiserver", f"--etcd-servers=http://127.0.0.1:{etcd}"),
                *("--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", f"--secure-port={port}"),
                *("--endpoint-reconciler-type=none", "--service-cluster-ip-range=10.96.0.0/16"),
                *("--authorization-mode=RBAC", "--disable-admission-plugins=ServiceAccount"),
                f"--tls-cert-file={folder / 'apiserver.crt'}",
                f"--tls-private-key-file={folder / 'apiserver.key'}",
                f"--client-ca-file={folder / 'ca.crt'}",
                "--service-account-issuer=https://kubernetes.default.svc",
                f"--service-account-key-file={folder / 'sa.pub'}",
                f"--service-account-signing-key-file={folder / 'sa.key'}",
                f"--requestheader-client-ca-file={folder / 'front-proxy-ca.crt'}",
                "--requestheader-allowed-names=front-proxy-client",
                "--requestheader-username-headers=X-Remote-User",
                "--requestheader-group-headers=X-Remote-Group",
                "--requestheader-extra-headers-prefix=X-Remote-Extra-",
                f"--proxy-client-cert-file={folder / 'front-proxy.crt'}",
                f"--proxy-client-key-file={folder / 'front-proxy.key'}",
            )
        )
        give_up_at = time.monotonic() + START_LIMIT_S
        while not _is_ready(server):
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < give_up_at, log.read_text()[-4000:]
            time.sleep(0.2)
        yield server
    shutil.rmtree(folder / "etcd")


def _is_ready(server: ApiServer) -> bool:
    try:
        return server.kubectl("get", "--raw=/readyz") == "ok"
    except AssertionError:
        return False


@contextmanager
def _running(log: Path, *command: object) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(part) for part in command], stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
