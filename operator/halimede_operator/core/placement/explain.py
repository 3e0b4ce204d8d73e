"""Says in words which devices are free, and why they do not serve an object that waits for devices."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from halimede_operator.core.placement.choice import (
    WHOLE,
    Demand,
    Option,
    Placement,
    better_than,
    kinds_of,
    options_of,
    smaller_kind,
    with_headroom,
)
from halimede_operator.core.placement.inventory import Device, Holding, Node, shown_profile
from halimede_operator.core.placement.ledger import Ledger
from halimede_operator.core.placement.node_filter import Labels, failing
from halimede_operator.core.reading import clean, decimal, text_at
from halimede_operator.core.spec.types import Accelerator, AcceleratorType, DeviceClaim, DeviceRequest, Json, Key, Kind

MAX_LISTED = 3
MAX_CHARACTERS = 700
_SHORT_KINDS = {Kind.INFERENCE_MODEL: "im", Kind.MODEL_ENSEMBLE: "mens"}
CANNOT_SEE_NODES = "which devices exist is not known: an operator of some namespaces may not read nodes"
NAME_THE_SLICE = f"{CANNOT_SEE_NODES}; name the slice in spec.accelerator.mig.profile"


@dataclass(frozen=True, slots=True)
class Tenant:
    """An object that holds devices."""

    demand: Demand
    placement: Placement
    """The devices of its pods, or of those that will replace them."""
    may_move: bool = False
    """It may get other devices while its spec asks for the same."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """What is known of an object whose pods wait for devices."""

    placement: Placement | None = None
    """What its pods request; None before there are any."""
    tenants: Mapping[Key, Tenant] = field(default_factory=dict)
    """Objects that hold devices that would serve it."""
    only_beside: bool = False
    """It is being updated, and its spec says that a new pod starts beside an old one."""


def holders(demand: Demand, ledger: Ledger) -> list[Key]:
    """Other objects that hold devices that would serve this one; those with the smallest first."""
    found = (
        holding.key
        for option in options_of(demand, ledger)
        for _, holding in _held(option, demand)
        if holding.key is not None and not ledger.is_ending(holding)
    )
    return list(dict.fromkeys(found))


def movable(demand: Demand, tenants: Mapping[Key, Tenant], ledger: Ledger) -> dict[Key, Placement]:
    """The tenants for which smaller devices that are free would do, with these. Empty while one of them is moving, so
    that not more of them move than must."""
    held = {(option.placement.resource, option.placement.profile) for option in options_of(demand, ledger)}
    if any((each.placement.resource, each.placement.profile) not in held for each in tenants.values()):
        return {}
    found = {key: smaller_kind(each.placement, each.demand, ledger) for key, each in tenants.items()}
    return {key: smaller for key, smaller in found.items() if smaller is not None}


def _held(option: Option, demand: Demand) -> Iterator[tuple[Node, Holding]]:
    """Devices of an option that others hold."""
    for node in option.nodes:
        for holding in node.holdings:
            if holding.amounts.devices[option.placement.resource] and holding.key != demand.key:
                yield node, holding


def explain(demand: Demand, ledger: Ledger, waiting: Waiting = Waiting()) -> str:
    """`need 1x 12 GiB; 2x 1g.10gb free on node a; nearest: 2g.20gb on b, held by im/bert`. Equal states give equal
    texts."""
    need = f"need {_need_text(demand.accelerator)}"
    if not any(node.devices for node in ledger.nodes):
        return f"{need}; no node has devices"
    options = options_of(demand, ledger)
    parts = [need, *_free(demand, ledger, waiting.placement)]
    if nearest := _nearest(demand, options, ledger):
        parts.append(f"nearest: {nearest}")
    elif not options:
        parts.append(_too_few(demand, ledger) or f"no node has devices that fit{_held_misfits(demand, ledger)}")
    for key, smaller in list(movable(demand, waiting.tenants, ledger).items())[:MAX_LISTED]:
        is_near = key.namespace == demand.key.namespace
        who = f"{_SHORT_KINDS[key.kind]}/{key.name}" if is_near else "an object of another namespace"
        parts.append(f"{who} would fit on the free {_kind_text(smaller)}")
    if waiting.only_beside and _has_own(demand, options):
        parts.append(
            "its own pods hold devices that fit: with spec.rollout.policy Surge each new pod needs a free one; Auto or "
            "InPlace lets an old pod go first"
        )
    parts += [f"node {node.name}: {node.misconfiguration}" for node in ledger.nodes if node.misconfiguration][:1]
    return clean("; ".join(parts), MAX_CHARACTERS)


def free_text(demand: Demand) -> str:
    """For an object whose pods wait although there is room for all of them."""
    return f"need {_need_text(demand.accelerator)}; devices that fit are free, or will be soon"


def claim_text(claim: DeviceClaim) -> str:
    """What a pod with a claim needs; which devices are free is known to kube-scheduler alone."""
    need = " and ".join(map(_request_text, claim.requests))
    return f"need {need}; kubectl get resourceclaims -A lists what is taken"


def _request_text(request: DeviceRequest) -> str:
    match len(request.selectors):
        case 0:
            which = ""
        case 1:
            which = " that its selector matches"
        case number:
            which = f" that one of its {number} selectors matches"
    return f"{request.count}x device of class {request.device_class}{which}"


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


def _kind_text(placement: Placement) -> str:
    return shown_profile(placement.profile) or "GPU"


def _is_hint(accelerator: Accelerator, device: Device) -> bool:
    """Whether it helps to say why this device does not serve: slices are no hint for whole GPUs."""
    match accelerator.type:
        case AcceleratorType.GPU:
            return device.resource == WHOLE and not device.profile
        case AcceleratorType.SHARED:
            return device.is_shared or not device.profile
        case _:
            return True


def _free(demand: Demand, ledger: Ledger, current: Placement | None) -> Iterator[str]:
    """The free devices, largest first, with the reason why each does not serve. current: what the pods request."""
    found = sorted(
        (
            (node, device, free)
            for node in ledger.nodes
            for device in node.devices
            if _is_hint(demand.accelerator, device) and (free := ledger.free(node, device.resource))
        ),
        key=lambda each: (-(each[1].memory_mib or 0), each[0].name, each[1].resource),
    )
    for node, device, free in found[:MAX_LISTED]:
        why_not = _why_not(demand, ledger, node, device) or _usable(demand, ledger, device, current)
        yield f"{free}x {device.text} free on node {node.name}, {why_not}"
    if len(found) > MAX_LISTED:
        yield f"others free on {len(found) - MAX_LISTED} more nodes or of more kinds"
    if not found:
        yield f"no {'GPU' if demand.accelerator.type is AcceleratorType.GPU else 'device'} is free"


def _why_not(demand: Demand, ledger: Ledger, node: Node, device: Device) -> str:
    if not node.is_ready:
        return "which is not ready"
    if obstacle := demand.filter.obstacle(node.name, node.labels, node.taints):
        return f"which {obstacle}"
    if why := _misfit(demand.accelerator, ledger, node, device):
        return why
    if ledger.free(node, device.resource) < demand.accelerator.count:
        return f"where {demand.accelerator.count} are needed together"
    if not ledger.pods_that_fit(node, demand.amounts(device.resource)):
        return "where CPU, memory or the number of pods is short"
    return ""


def _usable(demand: Demand, ledger: Ledger, device: Device, current: Placement | None) -> str:
    """When the object gets a free device that fits."""
    if current is None or (current.resource, current.profile) == (device.resource, device.profile):
        return "which the scheduler will give to it"
    other = better_than(current, demand, ledger)
    if other is not None and (other.resource, other.profile) == (device.resource, device.profile):
        return f"which it takes if it still waits after {demand.accelerator.move_after_seconds} s"
    return "which is of another kind than its pods request"


def _misfit(accelerator: Accelerator, ledger: Ledger, node: Node, device: Device) -> str:
    """Which label of the node says that its devices do not fit; "" if they do."""
    is_shared = accelerator.type is AcceleratorType.SHARED
    kinds = [
        kind
        for kind in kinds_of(accelerator, ledger.nodes)
        if kind.resource == device.resource and (is_shared or kind.profile == device.profile)
    ]
    if not kinds:
        return "which is of another kind" if device.profile or is_shared else "which is a whole GPU"
    found = min((failing(term, node.labels) for kind in kinds for term in kind.terms), key=len, default=[])
    return _label_text(found[0], node.labels) if found else ""


def _label_text(expression: Json, labels: Labels) -> str:
    """Why a node with these labels does not meet this condition."""
    label, operator = text_at(expression, "key"), text_at(expression, "operator")
    value = labels.get(label)
    if value is None:
        is_known = f"{WHOLE}.product" in labels
        return f"which has no label {label}" if is_known else "which has no labels of GPU feature discovery"
    if operator in {"NotIn", "DoesNotExist"}:
        return f"which is shared ({label} is {value})"
    if label.startswith(f"{WHOLE}.compute."):
        major, minor = (labels.get(f"{WHOLE}.compute.{part}", "?") for part in ("major", "minor"))
        return f"which has compute capability {major}.{minor} ({WHOLE}.compute.major and .minor)"
    if label.endswith(".memory"):
        return f"which has {_memory(decimal(value))} ({label} is {value})"
    return f"whose {label} is {value}"


def _too_few(demand: Demand, ledger: Ledger) -> str:
    """`no node has 4 GPUs; node-2 has 2`, if that is why no node has devices that fit; "" otherwise."""
    found = [
        (node.count_of(kind.resource), node.name, kind)
        for kind in kinds_of(demand.accelerator, ledger.nodes)
        for node in ledger.eligible(demand.claim(kind))
    ]
    if not found:
        return ""
    most, name, kind = max(found, key=lambda each: each[0])
    count = demand.accelerator.count
    devices = f"{_kind_text(kind)} slices" if kind.profile else "GPUs"
    has_others = any(node.count_of(kind.resource) >= count for node in ledger.nodes)
    return f"no node {'that fits ' if has_others else ''}has {count} {devices}; {name} has {most}"


def _held_misfits(demand: Demand, ledger: Ledger) -> str:
    """The reason that devices in use by other pods would not fit if they were free; "" without such devices."""
    found = (
        f"{device.text} on node {node.name}, {why}"
        for node in ledger.nodes
        for device in node.devices
        if _is_hint(demand.accelerator, device)
        and not ledger.free(node, device.resource)
        and (why := _why_not(demand, ledger, node, device))
    )
    listed = list(itertools.islice(found, MAX_LISTED))
    return f" ({'; '.join(listed)})" if listed else ""


def _nearest(demand: Demand, options: Sequence[Option], ledger: Ledger) -> str:
    """The smallest devices that fit but that others have, and who."""
    for option in options:
        for node, _ in _held(option, demand):
            held = [holding for where, holding in _held(option, demand) if where is node]
            who = _holders(demand.key, (holding.key or holding.namespace for holding in held))
            ending = " and free soon" if all(map(ledger.is_ending, held)) else ""
            return f"{_kind_text(option.placement)} on {node.name}, held by {who}{ending}"
    return ""


def _has_own(demand: Demand, options: Sequence[Option]) -> bool:
    """Whether the object itself holds devices that fit."""
    return any(
        holding.key == demand.key and holding.amounts.devices[option.placement.resource]
        for option in options
        for node in option.nodes
        for holding in node.holdings
    )


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
