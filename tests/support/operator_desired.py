"""The children of a spec, with the devices that it names itself."""

from collections.abc import Mapping

from halimede_operator.core.children.desired import build, desired, template_without_devices
from halimede_operator.core.labels import GENERATION, INPUTS, PLACEMENT
from halimede_operator.core.placement.choice import Placement, demand_of, named
from halimede_operator.core.platform import Platform
from halimede_operator.core.rollout.strategy import strategy_at_rest
from halimede_operator.core.scaling.replicas import replicas_of
from halimede_operator.core.snapshot import Object
from halimede_operator.core.spec.types import Key, ModelSpec, Spec

CHOSEN = Placement("nvidia.com/mig-2g.20gb", "2g.20gb")
"""For a spec that names an amount of memory."""


def children_of_spec(
    key: Key, uid: str, spec: Spec, members: Mapping[str, ModelSpec], platform: Platform
) -> tuple[Object, ...]:
    """The children of an object without earlier revisions."""
    workload, placement = spec.workload, None
    annotations = {INPUTS: "inputs", GENERATION: "1"}
    if workload.accelerator.is_wanted:
        template = template_without_devices(key, spec, members, platform)
        placement = named(demand_of(key, workload, template)) or CHOSEN
        annotations[PLACEMENT] = placement.written()
    revision = build(key, spec, members, platform, placement, annotations)
    policy, replicas = strategy_at_rest(workload, None), replicas_of(workload, None, scaler_exists=False)
    return desired(key, uid, workload, platform, revision, policy, replicas)
