"""The model instances to create, and the device of each."""

from collections.abc import Callable
from dataclasses import replace

from halimede.core.config.model_config import InstanceKind, ModelConfig, ModelInstanceGroup
from halimede.core.config.validate import MAX_INSTANCES, group_name, too_many_instances
from halimede.core.inventory import Inventory
from halimede.core.types import Device, Placement
from halimede.core.types.error import clip, invalid


def completed_groups(
    config: ModelConfig, inventory: Inventory, *, default_count: Callable[[str], int], backend_gpu: bool
) -> tuple[ModelInstanceGroup, ...]:
    """The instance groups with names, kinds, counts and GPUs filled in, as the configuration dump shows them.

    `default_count` maps "CPU", "GPU" and "MODEL" to the backend's default number of instances; `backend_gpu` states
    whether the backend can use a GPU at all. InferenceError INVALID_ARG if a group names a device that does not exist.
    An ensemble has no groups.
    """
    if config.ensemble_scheduling is not None:
        return ()
    # A model without groups gets one of its own name; groups without names are numbered.
    groups = config.instance_group or (ModelInstanceGroup(name=config.name),)
    return tuple(
        _completed(
            config, replace(group, name=group_name(config.name, i, group)), inventory, default_count, backend_gpu
        )
        for i, group in enumerate(groups)
    )


def plan_instances(config: ModelConfig, inventory: Inventory) -> tuple[Placement, ...]:
    """Every instance to create, in order. The groups are complete; INVALID_ARG if they have too many instances.

    `count` is per GPU. The instances of a group are assigned to its devices in turn, so the first instances are spread
    over all of them. They are numbered across the group: names are unique, and on one device they are Triton's.
    """
    # Checked before any instance is created: a user can write any number as a count.
    total = instance_count(config)
    if total > MAX_INSTANCES:
        raise invalid(too_many_instances(config.name, total))
    placements: list[Placement] = []
    for group in config.instance_group:
        devices = _devices(group, inventory)
        for number in range(group.count * len(devices)):
            placements.append(
                Placement(
                    name=f"{group.name}_{number}",
                    ordinal=len(placements),
                    kind=group.kind.name.removeprefix("KIND_"),
                    device=devices[number % len(devices)],
                    profile=group.profile,
                    passive=group.passive,
                )
            )
    return tuple(placements)


def instance_count(config: ModelConfig) -> int:
    """The instances of all groups, which are complete, on all their devices; 1 without groups."""
    return sum(max(1, group.count) * max(1, len(group.gpus)) for group in config.instance_group) or 1


def first_device(config: ModelConfig, inventory: Inventory) -> Device | None:
    """The device of the first instance on a GPU, before the groups are completed; None if there is none."""
    for group in config.instance_group or (ModelInstanceGroup(),):
        if group.kind in (InstanceKind.KIND_AUTO, InstanceKind.KIND_GPU) and inventory.devices:
            return inventory.by_index(group.gpus[0]) if group.gpus else inventory.devices[0]
    return None


def _devices(group: ModelInstanceGroup, inventory: Inventory) -> list[Device | None]:
    if group.kind is not InstanceKind.KIND_GPU:
        return [None]
    return [inventory.by_index(gpu) for gpu in group.gpus]


def _completed(
    config: ModelConfig,
    group: ModelInstanceGroup,
    inventory: Inventory,
    default_count: Callable[[str], int],
    backend_gpu: bool,
) -> ModelInstanceGroup:
    kind = group.kind
    if kind is InstanceKind.KIND_AUTO:
        kind = _resolved_kind(group, inventory, backend_gpu)
    gpus: tuple[int, ...] = ()
    if kind is InstanceKind.KIND_GPU:
        _require_gpus(config, group, inventory, backend_gpu)
        gpus = group.gpus or tuple(device.index for device in inventory.devices)
    count = group.count or default_count(kind.name.removeprefix("KIND_"))
    return replace(group, kind=kind, count=count, gpus=gpus)


def _resolved_kind(group: ModelInstanceGroup, inventory: Inventory, backend_gpu: bool) -> InstanceKind:
    """Resolve KIND_AUTO: GPU if the backend can use GPUs and all GPUs that the group names exist, else CPU."""
    present = all(inventory.by_index(gpu) is not None for gpu in group.gpus)
    return InstanceKind.KIND_GPU if backend_gpu and inventory.devices and present else InstanceKind.KIND_CPU


def _require_gpus(config: ModelConfig, group: ModelInstanceGroup, inventory: Inventory, backend_gpu: bool) -> None:
    problem = None
    absent = [gpu for gpu in group.gpus if inventory.by_index(gpu) is None]
    if not inventory.devices:
        problem = "has kind KIND_GPU but no GPUs are available"
    elif not backend_gpu:
        problem = (
            "has kind KIND_GPU but server does not support GPUs: what is installed for backend "
            f"'{clip(config.backend)}' runs on CPU only"
        )
    elif absent:
        there = ", ".join(str(device.index) for device in inventory.devices)
        problem = f"specifies invalid or unsupported gpu id {absent[0]}, available are: {there}"
    if problem:
        raise invalid(f"instance group {clip(group.name)} of model {clip(config.name)} {problem}")
