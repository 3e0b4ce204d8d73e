"""Real KEDA: its operator and its server of external metrics, built from Go modules, beside the API server."""

from pathlib import Path

from cluster.api import Refused
from cluster.control import ADDRESS
from cluster.metrics import lead_to_control, serve_group
from cluster.own import OwnCluster
from cluster.programs import check_machine, compile_programs, folder_of, go
from cluster.spaces import eventually
from support.phases import only_one

MODULE = Path(__file__).parent / "keda"
NAMESPACE = "keda"
SERVICE = "keda-metrics-apiserver"
EXTERNAL = "external.metrics.k8s.io/v1beta1"
GRPC_PORT = 9666
ADAPTER_PORT = 6445
KINDS = ("scaledobjects", "scaledjobs", "triggerauthentications", "clustertriggerauthentications")


def provide_keda() -> Path:
    """The folder with `operator` and `adapter`. Raises Unavailable. The first build takes a quarter of an hour of one core."""
    check_machine()
    folder = folder_of(MODULE)
    with only_one(folder.with_suffix(".lock"), "KEDA's programs"):
        if not folder.exists():
            partial = folder.with_suffix(".partial")
            compile_programs(MODULE, "KEDA", partial, "-s -w", "tool")
            partial.rename(folder)
    return folder


def crds() -> list[Path]:
    """The files of its CRDs, of the version of its programs."""
    source = Path(go(MODULE, "list", "-m", "-f", "{{.Dir}}", "github.com/kedacore/keda/v2").strip())
    bases = source / "config" / "crd" / "bases"
    return sorted(bases.glob("*.yaml"))


class Keda:
    """KEDA in a cluster; it may do everything there."""

    def __init__(self, cluster: OwnCluster) -> None:
        self._cluster = cluster

    def start(self) -> None:
        programs = provide_keda()
        cluster, control = self._cluster, self._cluster.control
        # Its CRDs are longer than the annotation of a client-side apply may be.
        cluster.kubectl("apply", "--server-side", *(f"--filename={path}" for path in crds()))
        eventually(self._serves_kinds, "KEDA's kinds")
        certificates = cluster.state / "keda"
        certificates.mkdir(exist_ok=True)
        (certificates / "ca.crt").write_bytes(control.authority.certificate)
        host = f"{SERVICE}.{NAMESPACE}.svc"
        control.authority.issue(host, "", host, "localhost", ADDRESS, "127.0.0.1").write(certificates / "tls")
        login = control.write_login("keda", "system:masters")
        # What a pod reads from its ServiceAccount's folder comes from variables here.
        namespaces = (f"POD_NAMESPACE={NAMESPACE}", f"KEDA_CLUSTER_OBJECT_NAMESPACE={NAMESPACE}", "WATCH_NAMESPACE=")
        environment = ("env", f"KUBECONFIG={login}", *namespaces)
        lead_to_control(cluster, NAMESPACE, SERVICE, ADAPTER_PORT)
        operator = control.space.start(
            "keda-operator",
            *environment,
            programs / "operator",
            f"--cert-dir={certificates}",
            f"--metrics-service-bind-address={ADDRESS}:{GRPC_PORT}",
            # No admission and no rotation of certificates: nothing of them belongs to scaling.
            "--enable-webhook-patching=false",
            "--enable-apiservice-patching=false",
            "--metrics-bind-address=0",
            "--health-probe-bind-address=0",
        )
        adapter = control.space.start(
            "keda-adapter",
            *environment,
            programs / "adapter",
            f"--secure-port={ADAPTER_PORT}",
            f"--bind-address={ADDRESS}",
            "--port=8181",
            f"--metrics-service-address={ADDRESS}:{GRPC_PORT}",
            f"--cert-dir={certificates}",
            f"--client-ca-file={certificates / 'ca.crt'}",
            f"--tls-cert-file={certificates / 'tls.crt'}",
            f"--tls-private-key-file={certificates / 'tls.key'}",
            # Without it, the adapter takes itself for a pod, and ends.
            f"--lister-kubeconfig={login}",
            f"--authentication-kubeconfig={login}",
            f"--authorization-kubeconfig={login}",
        )

        def check() -> None:
            operator.check()
            adapter.check()

        serve_group(cluster, EXTERNAL, NAMESPACE, SERVICE, ADAPTER_PORT, check)

    def _serves_kinds(self) -> bool:
        try:
            found = self._cluster.api.get("/apis/keda.sh/v1alpha1")["resources"]
        except Refused:
            return False
        return set(KINDS) <= {each["name"] for each in found}

    def stop(self) -> None:
        """Its CRDs stay."""
        self._cluster.kubectl("delete", "apiservice", "v1beta1.external.metrics.k8s.io")
        for name in ("keda-operator", "keda-adapter"):
            self._cluster.control.space.programs.pop(name).stop()
