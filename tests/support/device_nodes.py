"""Nodes with GPUs and pods that hold them, as the API server returns them."""

from collections.abc import Iterable, Mapping
from typing import Any

from cluster.gpus import H100, Layout, Model
from halimede_operator.core.placement.inventory import Inventory, has_devices, inventory_of, summary_of
from halimede_operator.core.snapshot import Object

A100 = Model(
    "NVIDIA-A100-SXM4-80GB", "ampere", (8, 0), 81920,
    {"1g.10gb": (9856, 14), "2g.20gb": (19968, 28), "3g.40gb": (40192, 42)},
)  # fmt: skip
H100_NVL = Model("NVIDIA-H100-NVL", "hopper", (9, 0), 95830, {"1g.12gb": (11008, 16), "3g.47gb": (47488, 60)})


def node(
    name: str,
    *cards: tuple[str, ...],
    model: Model = H100,
    strategy: str = "mixed",
    labels: Mapping[str, str] = {},
    taints: Iterable[Object] = (),
    ready: bool = True,
    **allocatable: str,
) -> Object:
    """A node with these cards: a tuple of the profiles of its slices each, () for a whole GPU."""
    layout = Layout(cards, model, strategy)
    counts = {resource: str(len(found)) for resource, found in layout.devices(name).items()}
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **layout.labels(), **labels}},
        "spec": {"taints": list(taints)},
        "status": {
            "allocatable": {"cpu": "16", "memory": "64Gi", "pods": "110", **counts, **allocatable},
            "conditions": [{"type": "Ready", "status": "True" if ready else "Unknown"}],
        },
    }


def pod(
    resource: str = "",
    count: int = 1,
    *,
    on: str = "",
    of: str = "",
    namespace: str = "prod",
    ends_at: str | None = None,
    **spec: Any,
) -> Object:
    """A pod that requests devices. on: its node. of: the InferenceModel that it belongs to. ends_at: when its grace
    period is over; None if it is not being deleted."""
    labels = {"app.kubernetes.io/managed-by": "halimede-operator", "halimede.dev/model": of} if of else {}
    limits = {resource: str(count)} if resource else {}
    return {
        "metadata": {
            "name": "p",
            "namespace": namespace,
            "labels": labels,
            "creationTimestamp": "2026-11-22T09:00:00Z",
            **({"deletionTimestamp": ends_at} if ends_at is not None else {}),
        },
        "spec": {"containers": [{"name": "server", "resources": {"limits": limits}}], "nodeName": on, **spec},
        "status": {"phase": "Running" if on else "Pending"},
    }


def inventory(nodes: Iterable[Object], pods: Iterable[Object] = ()) -> Inventory:
    nodes = [each for each in nodes if has_devices(each)]
    names = frozenset(each["metadata"]["name"] for each in nodes)
    return inventory_of(nodes, [kept for each in pods if (kept := summary_of(each, names)) is not None])
