"""The control plane: etcd, API server, controllers, scheduler, DNS, and access to Services from its own namespace."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.api import Api
from cluster.pki import Authority, key_pair, write_kubeconfig
from cluster.spaces import Space

ADDRESS = "10.244.0.1"
"""Of the control plane, in a network that exists in its namespace alone; so every cluster has the same."""
SERVICES = "10.96.0.0/16"
API_SERVICE = "10.96.0.1"
DNS_SERVICE = "10.96.0.10"
DOMAIN = "cluster.local"
PORT = 6443
FAULTY_PORT = 7443
PROGRAMS = ("apiserver", "kube-controller-manager", "kube-proxy", "kube-scheduler")
API_HOSTS = (
    *(ADDRESS, "127.0.0.1", API_SERVICE, "localhost"),
    *("kubernetes", "kubernetes.default", "kubernetes.default.svc", f"kubernetes.default.svc.{DOMAIN}"),
)


@dataclass(frozen=True)
class HpaTiming:
    """The flags of the controller of HorizontalPodAutoscalers; by default those of Kubernetes."""

    sync_period_s: int = 15
    downscale_stabilization_s: int = 300
    initial_readiness_delay_s: int = 30
    cpu_initialization_period_s: int = 300

    def flags(self) -> tuple[str, ...]:
        prefix = "--horizontal-pod-autoscaler"
        return (
            f"{prefix}-sync-period={self.sync_period_s}s",
            f"{prefix}-downscale-stabilization={self.downscale_stabilization_s}s",
            f"{prefix}-initial-readiness-delay={self.initial_readiness_delay_s}s",
            f"{prefix}-cpu-initialization-period={self.cpu_initialization_period_s}s",
        )


QUICK = HpaTiming(1, 5, 1, 1)
COREFILE = f""".:53 {{
  bind {ADDRESS}
  errors
  kubernetes {DOMAIN} in-addr.arpa {{
    kubeconfig %s
  }}
  cache 1
}}
"""


@dataclass(frozen=True)
class ControlPlane:
    """How its programs are started. `state` is the folder of this cluster, `programs` that of the programs."""

    state: Path
    programs: Path
    space: Space
    authority: Authority

    @property
    def pki(self) -> Path:
        return self.state / "pki"

    def prepare_network(self) -> None:
        # A Service's address needs some route, and a source that those who answer can reach.
        self.space.run("hostname", "control")
        self.space.wire(f"""
            ip link set lo up
            ip link add br0 type bridge
            ip address add {ADDRESS}/24 dev br0
            ip link set br0 up
            ip route add {SERVICES} dev br0 src {ADDRESS}
            echo 1 > /proc/sys/net/ipv4/ip_forward
        """)

    def write_pki(self) -> None:
        self.pki.mkdir()
        (self.pki / "ca.crt").write_bytes(self.authority.certificate)
        self.authority.issue("kube-apiserver", "", *API_HOSTS).write(self.pki / "apiserver")
        self.authority.issue("kube-apiserver-kubelet-client", "system:masters").write(self.pki / "kubelet-client")
        self.authority.issue("admin", "system:masters").write(self.pki / "admin")
        # By another authority: whoever it signs may say of itself that it is anybody.
        front_proxy = Authority("front-proxy-ca")
        (self.pki / "front-proxy-ca.crt").write_bytes(front_proxy.certificate)
        front_proxy.issue("front-proxy-client").write(self.pki / "front-proxy-client")
        private, public = key_pair()
        (self.pki / "sa.key").write_bytes(private)
        (self.pki / "sa.pub").write_bytes(public)

    def write_login(self, user: str, organization: str = "") -> Path:
        """A kubeconfig for a program within the cluster's network."""
        path = self.pki / f"{user.rpartition(':')[2]}.conf"
        identity = self.authority.issue(user, organization)
        return write_kubeconfig(path, f"https://{ADDRESS}:{PORT}", self.authority.certificate, identity)

    def start_store(self) -> None:
        clients, peers = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
        self.space.start(
            "etcd",
            self.programs / "etcd",
            f"--data-dir={self.state / 'etcd'}",
            f"--listen-client-urls={clients}",
            f"--advertise-client-urls={clients}",
            f"--listen-peer-urls={peers}",
            f"--initial-advertise-peer-urls={peers}",
            f"--initial-cluster=default={peers}",
            "--unsafe-no-fsync",
        )

    def start_api(self, gates: Sequence[str] = ()) -> None:
        """gates: feature gates, such as `HPAScaleToZero=true`."""
        policy = self.state / "audit-policy.json"
        # Requests of the cluster's own programs and of the tests are most of the log, and no test reads them.
        rules = [
            {"level": "None", "userGroups": ["system:nodes", "system:serviceaccounts:kube-system"]},
            {"level": "None", "users": [f"system:{name}" for name in PROGRAMS]},
            {"level": "None", "users": ["admin", "dns", "kwok"], "verbs": ["get", "list", "watch"]},
            {"level": "Metadata"},
        ]
        policy.write_text(json.dumps({
            "apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"], "rules": rules,
        }))  # fmt: skip
        pki = self.pki
        self.space.start(
            "kube-apiserver",
            self.programs / "kube-apiserver",
            "--etcd-servers=http://127.0.0.1:2379",
            f"--bind-address={ADDRESS}",
            f"--advertise-address={ADDRESS}",
            f"--secure-port={PORT}",
            f"--tls-cert-file={pki}/apiserver.crt",
            f"--tls-private-key-file={pki}/apiserver.key",
            f"--client-ca-file={pki}/ca.crt",
            f"--service-account-issuer=https://kubernetes.default.svc.{DOMAIN}",
            f"--service-account-key-file={pki}/sa.pub",
            f"--service-account-signing-key-file={pki}/sa.key",
            f"--service-cluster-ip-range={SERVICES}",
            "--authorization-mode=Node,RBAC",
            "--allow-privileged=true",
            # Off by default, and on in OpenShift: who blocks an owner's end needs a right for it.
            "--enable-admission-plugins=OwnerReferencesPermissionEnforcement",
            f"--requestheader-client-ca-file={pki}/front-proxy-ca.crt",
            "--requestheader-allowed-names=front-proxy-client",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={pki}/front-proxy-client.crt",
            f"--proxy-client-key-file={pki}/front-proxy-client.key",
            "--kubelet-preferred-address-types=InternalIP",
            f"--kubelet-certificate-authority={pki}/ca.crt",
            f"--kubelet-client-certificate={pki}/kubelet-client.crt",
            f"--kubelet-client-key={pki}/kubelet-client.key",
            f"--audit-policy-file={policy}",
            f"--audit-log-path={self.state / 'audit.log'}",
            "--profiling=false",
            *_gates(gates),
        )

    def start_controllers(self) -> None:
        """What would end at once were the API server not ready."""
        self.start_manager()
        self.space.start(
            "kube-scheduler",
            self.programs / "kube-scheduler",
            *_logins(self.write_login("system:kube-scheduler")),
            "--bind-address=127.0.0.1",
            "--leader-elect=false",
        )

    def start_manager(self, timing: HpaTiming = QUICK, gates: Sequence[str] = ()) -> None:
        """The process with the controllers. Like `start_api` it replaces one that was stopped."""
        manager = self.write_login("system:kube-controller-manager")
        self.space.start(
            "kube-controller-manager",
            self.programs / "kube-controller-manager",
            *_logins(manager),
            "--bind-address=127.0.0.1",
            "--leader-elect=false",
            "--use-service-account-credentials=true",
            f"--root-ca-file={self.pki}/ca.crt",
            f"--service-account-private-key-file={self.pki}/sa.key",
            "--allocate-node-cidrs=false",
            "--node-monitor-period=1s",
            "--node-monitor-grace-period=10s",
            *timing.flags(),
            "--kube-api-qps=200",
            "--kube-api-burst=400",
            *_gates(gates),
        )

    def start_network(self, node: str) -> None:
        """Services' addresses and names. kube-proxy needs to be on some node, and ends when that is deleted."""
        proxy = self.write_login("system:kube-proxy")
        config = write_proxy_config(self.state / "kube-proxy.json", node, ADDRESS, proxy)
        command = f"while :; do {self.programs}/kube-proxy --config={config}; sleep 1; done"
        self.space.start("kube-proxy", "sh", "-c", command)
        # Everything there may be read by it; a role of its own would be a copy of CoreDNS'.
        login = self.write_login("dns", "system:masters")
        corefile = self.state / "Corefile"
        corefile.write_text(COREFILE % login)
        self.space.start("coredns", self.programs / "coredns", "-conf", corefile)

    def announce_dns(self, api: Api) -> None:
        ports = [
            {"name": name, "port": 53, "protocol": protocol} for name, protocol in (("dns", "UDP"), ("tcp", "TCP"))
        ]
        metadata = {"name": "kube-dns", "namespace": "kube-system", "labels": {"k8s-app": "kube-dns"}}
        service = {"metadata": metadata, "spec": {"clusterIP": DNS_SERVICE, "ports": ports}}
        api.create("/api/v1/namespaces/kube-system/services", service)
        slices = "/apis/discovery.k8s.io/v1/namespaces/kube-system/endpointslices"
        api.create(slices, {
            "metadata": {"name": "kube-dns", "labels": {"kubernetes.io/service-name": "kube-dns"}},
            "addressType": "IPv4",
            "endpoints": [{"addresses": [ADDRESS]}],
            "ports": ports,
        })  # fmt: skip


def write_proxy_config(path: Path, node: str, address: str, login: Path) -> Path:
    config: dict[str, Any] = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "hostnameOverride": node,
        "bindAddress": address,
        "clientConnection": {"kubeconfig": str(login)},
        "healthzBindAddress": "127.0.0.1:10256",
        # The machine's own settings, which are not this cluster's to change.
        "conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }
    path.write_text(json.dumps(config))
    return path


def _logins(kubeconfig: Path) -> tuple[str, ...]:
    return tuple(f"--{kind}kubeconfig={kubeconfig}" for kind in ("", "authentication-", "authorization-"))


def _gates(gates: Sequence[str]) -> tuple[str, ...]:
    return (f"--feature-gates={','.join(gates)}",) if gates else ()
