"""Says in words which devices are free, and why they do not serve an object that waits for devices."""

from collections.abc import Iterable, Iterator, Sequence

from halimede_operator.core.api.spec import Accelerator, AcceleratorType, DeviceClaim, Key, Kind
from halimede_operator.core.placement.choice import Demand, Option, options_of, with_headroom
from halimede_operator.core.placement.inventory import Device, Node, shown_profile
from halimede_operator.core.placement.ledger import Ledger
from halimede_operator.core.reading import clean

MAX_LISTED = 3
MAX_CHARACTERS = 500
_SHORT_KINDS = {Kind.INFERENCE_MODEL: "im", Kind.MODEL_ENSEMBLE: "mens"}
CANNOT_SEE_NODES = "which devices exist is not known: an operator of some namespaces may not read nodes"
NAME_THE_SLICE = f"{CANNOT_SEE_NODES}; name the slice in spec.accelerator.mig.profile"


def explain(demand: Demand, ledger: Ledger) -> str:
    """`need 1x 12 GiB; 2x 1g.10gb free on node a; nearest: 2g.20gb on b, held by im/bert`. Equal states give equal
    texts."""
    need = f"need {_need_text(demand.accelerator)}"
    if not any(node.devices for node in ledger.nodes):
        return f"{need}; no node has devices"
    options = options_of(demand, ledger)
    parts = [need, *_free(demand, ledger, options)]
    if nearest := _nearest(demand, options):
        parts.append(f"nearest: {nearest}")
    elif not options:
        parts.append("no node has devices that fit")
    parts += [f"node {node.name}: {node.misconfiguration}" for node in ledger.nodes if node.misconfiguration][:1]
    return clean("; ".join(parts), MAX_CHARACTERS)


def claim_text(claim: DeviceClaim) -> str:
    """What a pod with a claim needs; which devices are free is known to kube-scheduler alone."""
    match len(claim.selectors):
        case 0:
            which = ""
        case 1:
            which = " that its selector matches"
        case number:
            which = f" that one of its {number} selectors matches"
    need = f"need {claim.count}x device of class {claim.device_class}{which}"
    return f"{need}; kubectl get resourceclaims -A lists what is taken"


def _need_text(accelerator: Accelerator) -> str:
    gpu = accelerator.gpu
    filters = [f"of {' or '.join(gpu.products)}"] if gpu.products else []
    filters += [f"with at least {_memory(gpu.min_memory_mib)}"] if gpu.min_memory_mib else []
    filters += ["of compute capability {}.{}".format(*gpu.min_capability)] if gpu.min_capability else []
    match accelerator.type:
        case AcceleratorType.SHARED:
            what = accelerator.shared_resource
        case AcceleratorType.MIG if accelerator.mig_profile is None:
            needed = accelerator.mig_min_memory_mib or 0
            kind = "a slice or a whole GPU" if accelerator.allow_whole else "a slice"
            with_room = f"{_memory(with_headroom(needed))} with headroom"
            what = f"{kind} with {_memory(needed)} ({with_room})"
        case AcceleratorType.MIG:
            what = accelerator.mig_profile or ""
        case _:
            what = "GPU"
    return " ".join([f"{accelerator.count}x {what}", *filters])


def _memory(mib: int | None) -> str:
    return "unknown memory" if mib is None else f"{mib / 1024:.4g} GiB"


def _free(demand: Demand, ledger: Ledger, options: Sequence[Option]) -> Iterator[str]:
    """The free devices, largest first, with the reason why each does not serve."""
    found = sorted(
        (
            (node, device, free)
            for node in ledger.nodes
            for device in node.devices
            if (free := ledger.free(node, device.resource))
        ),
        key=lambda each: (-(each[1].memory_mib or 0), each[0].name, each[1].resource),
    )
    for node, device, free in found[:MAX_LISTED]:
        yield f"{free}x {device.text} free on node {node.name}, {_why_not(demand, ledger, options, node, device)}"
    if len(found) > MAX_LISTED:
        yield f"others free on {len(found) - MAX_LISTED} more nodes or of more kinds"
    if not found:
        yield "no device is free"


def _why_not(demand: Demand, ledger: Ledger, options: Sequence[Option], node: Node, device: Device) -> str:
    if not node.is_ready:
        return "which is not ready"
    if obstacle := demand.filter.obstacle(node.name, node.labels, node.taints):
        return f"which {obstacle}"
    if not any(option.placement.resource == device.resource and node in option.nodes for option in options):
        wants_memory = demand.accelerator.mig_min_memory_mib is not None
        return f"which has {_memory(device.memory_mib)}" if wants_memory else "which is of another kind"
    if ledger.free(node, device.resource) < demand.accelerator.count:
        return f"where {demand.accelerator.count} are needed together"
    if not ledger.pods_that_fit(node, demand.amounts(device.resource)):
        return "where CPU, memory or the number of pods is short"
    return "which the scheduler will give to it"


def _nearest(demand: Demand, options: Sequence[Option]) -> str:
    """The smallest devices that fit but are taken, and by whom."""
    for option in options:
        resource = option.placement.resource
        for node in option.nodes:
            if holders := [holding for holding in node.holdings if holding.amounts.devices[resource]]:
                kind = shown_profile(option.placement.profile) or "GPU"
                who = _holders(demand.key, (holding.key or holding.namespace for holding in holders))
                return f"{kind} on {node.name}, held by {who}"
    return ""


def _holders(own: Key, holders: Iterable[Key | str]) -> str:
    """Objects of the same namespace by name. Of others nothing is said."""
    names: Sequence[str] = sorted({_holder(own, holder) for holder in holders})
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more


def _holder(own: Key, holder: Key | str) -> str:
    namespace = holder if isinstance(holder, str) else holder.namespace
    if isinstance(holder, Key) and namespace == own.namespace:
        return f"{_SHORT_KINDS[holder.kind]}/{holder.name}"
    return "a pod that is not of the operator" if namespace == own.namespace else "a pod of another namespace"
