"""A node: containerd, kubelet and kube-proxy in their own namespaces, like on a machine."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from cluster.control import ADDRESS, DNS_SERVICE, DOMAIN, ControlPlane, write_proxy_config
from cluster.programs import CNI_PLUGINS
from cluster.spaces import Program, Space, eventually
from cluster.unpacked import copy_unpacked

PAUSE = "localhost/pause:1"
PAUSE_ARCHIVE = "pause.tar"
SOCKET = "/run/containerd/containerd.sock"
# What a kubelet sets in the kernel is the whole machine's; in a node it writes into files.
KERNEL_SETTINGS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
CONTAINERD = f"""version = 2
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{CNI_PLUGINS}"
    conf_dir = "%s"
"""


@dataclass
class Node:
    number: int
    control: ControlPlane
    archives: Sequence[Path] = ()
    """Of the images that it has from the beginning."""
    _space: Space | None = field(default=None, init=False)

    @property
    def name(self) -> str:
        return f"node-{self.number}"

    @property
    def address(self) -> str:
        return f"10.244.0.{10 + self.number}"

    @property
    def pods(self) -> str:
        return f"10.244.{self.number}.0/24"

    @property
    def link(self) -> str:
        """The control plane's end of its cable."""
        return f"veth-{self.number}"

    @cached_property
    def folder(self) -> Path:
        folder = self.control.state / self.name
        for name in ("cni", "kubelet", "log", "settings"):
            (folder / name).mkdir(parents=True)
        if self.archives:
            copy_unpacked(self.archives, folder / "containerd")
        else:
            (folder / "containerd").mkdir()
        return folder

    @property
    def space(self) -> Space:
        assert self._space is not None, f"{self.name} does not run"
        return self._space

    @property
    def runs(self) -> bool:
        return self._space is not None

    @property
    def kubelet(self) -> Program:
        return self.space.programs["kubelet"]

    def boot(self) -> None:
        """Up to containerd, which needs no API server."""
        self._space = self.control.space.nest(self.name, self.control.programs / "pause")
        self._mount()
        self._connect()
        plugin = {
            "type": "ptp",  # every pod behind a router, so that Services' addresses are translated in every direction
            "ipMasq": False,
            "ipam": {
                "type": "host-local",
                "dataDir": "/run/cni",
                "ranges": [[{"subnet": self.pods}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }
        network = {"cniVersion": "0.4.0", "name": "pods", "plugins": [plugin]}
        (self.folder / "cni" / "pods.conflist").write_text(json.dumps(network))
        config = self.folder / "containerd.toml"
        config.write_text(CONTAINERD % (self.folder / "cni"))
        self.space.start("containerd", "containerd", "--config", config)
        self.load(self.control.programs / PAUSE_ARCHIVE)

    def join(self) -> None:
        """What needs the API server."""
        self._make_control_groups()
        pki = self.control.pki
        self.control.authority.issue(self.name, "", self.address, self.name).write(self.folder / "serving")
        (self.folder / "resolv.conf").touch()
        config = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": self.address,
            "authentication": {"x509": {"clientCAFile": f"{pki}/ca.crt"}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.control.state.name}/{self.name}",
            "clusterDNS": [DNS_SERVICE],
            "clusterDomain": DOMAIN,
            "containerRuntimeEndpoint": f"unix://{SOCKET}",
            "enforceNodeAllocatable": ["none"],
            # A test machine's disk may be full for others' sake.
            "evictionHard": {"memory.available": "1Mi", "nodefs.available": "1Mi", "imagefs.available": "1Mi"},
            "failCgroupV1": False,
            "failSwapOn": False,
            "imageGCHighThresholdPercent": 100,
            "localStorageCapacityIsolation": False,
            # A change is reported at once. As a sign of life a status costs all who watch nodes more than a lease.
            "nodeLeaseDurationSeconds": 20,
            "nodeStatusReportFrequency": "3s",
            "nodeStatusUpdateFrequency": "1s",
            "resolvConf": str(self.folder / "resolv.conf"),
            # With cgroup v2 the kernel would kill all of a container, which it cannot with v1.
            "singleProcessOOMKill": True,
            "tlsCertFile": f"{self.folder}/serving.crt",
            "tlsPrivateKeyFile": f"{self.folder}/serving.key",
        }
        (self.folder / "kubelet.json").write_text(json.dumps(config))
        login = self.control.write_login(f"system:node:{self.name}", "system:nodes")
        self.space.start(
            "kubelet",
            self.control.programs / "kubelet",
            f"--config={self.folder / 'kubelet.json'}",
            f"--kubeconfig={login}",
            f"--node-ip={self.address}",
            f"--hostname-override={self.name}",
        )
        proxy = write_proxy_config(
            self.folder / "kube-proxy.json", self.name, self.address, self.control.pki / "kube-proxy.conf"
        )
        self.space.start("kube-proxy", self.control.programs / "kube-proxy", f"--config={proxy}")

    def load(self, archive: Path) -> None:
        """Give containerd the images of an archive."""
        eventually(self._containerd_serves, f"containerd of {self.name}")
        self.space.run("ctr", "--namespace=k8s.io", f"--address={SOCKET}", "images", "import", archive)

    def connect(self, up: bool) -> None:
        """Put the cable in, or pull it out."""
        self.control.space.wire(f"ip link set {self.link} {'up' if up else 'down'}")

    def kill(self) -> None:
        self.space.kill()
        # The control plane's space waits for the first process of this one.
        self.control.space.programs.pop(self.name).collect()
        self._space = None

    def _containerd_serves(self) -> bool:
        self.space.programs["containerd"].check()
        return "overlayfs" in self.space.run("sh", "-c", f"ctr --address={SOCKET} plugins ls 2>&1 || :")

    def _mount(self) -> None:
        """Own folders where programs have theirs: the device plugins' cannot be put elsewhere."""
        for folder in ("/var/lib/kubelet", "/var/lib/containerd"):
            Path(folder).mkdir(exist_ok=True)
        lines = [
            f"hostname {self.name}",
            "mount -t tmpfs run /run",
            f"mount --bind {self.folder}/kubelet /var/lib/kubelet",
            "mount --make-rshared /var/lib/kubelet",
            f"mount --bind {self.folder}/containerd /var/lib/containerd",
            f"mount --bind {self.folder}/log /var/log",
        ]
        for number, (name, value) in enumerate(KERNEL_SETTINGS.items()):
            if not Path("/proc/sys", name).exists():
                continue
            file = self.folder / "settings" / str(number)
            file.write_text(value)
            lines.append(f"mount --bind {file} /proc/sys/{name}")
        self.space.run("sh", "-ec", "\n".join(lines))

    def _connect(self) -> None:
        self.control.space.wire(f"""
            ip link delete {self.link} 2>/dev/null || :
            ip link add {self.link} type veth peer name eth0 netns {self.space.first}
            ip link set {self.link} master br0 up
            ip route replace {self.pods} via {self.address}
        """)
        self.space.wire(f"""
            ip link set lo up
            ip address add {self.address}/24 dev eth0
            ip link set eth0 up
            ip route add default via {ADDRESS}
            echo 1 > /proc/sys/net/ipv4/ip_forward
        """)

    def _make_control_groups(self) -> None:
        """The kubelet wants its root to be there, with all that it is to control."""
        root = Path("/sys/fs/cgroup")
        hierarchies = [root] if (root / "cgroup.controllers").exists() else [h for h in root.iterdir() if h.is_dir()]
        for hierarchy in hierarchies:
            group = hierarchy
            for name in (self.control.state.name, self.name):
                group = group / name
                group.mkdir(exist_ok=True)
                if hierarchy == root:
                    controllers = (group.parent / "cgroup.controllers").read_text().split()
                    (group.parent / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in controllers))
                    continue
                for setting in ("cpuset.cpus", "cpuset.mems"):
                    # Of version 1: a new group has no processor.
                    if (group / setting).exists():
                        (group / setting).write_text((group.parent / setting).read_text())
