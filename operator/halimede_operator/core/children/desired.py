"""Builds all children that an object should have, in the order in which they are applied.

What pods need comes before the Deployment: the revision's ConfigMap, ServiceAccount and Services, and also the
NetworkPolicy, so that no pod is ever reachable that should not be.
"""

from collections.abc import Mapping

from halimede_operator.core.children.autoscaler import scaler
from halimede_operator.core.children.claim_template import claim_template
from halimede_operator.core.children.config_map import config_map, fetch_plan
from halimede_operator.core.children.content import content_of
from halimede_operator.core.children.deployment import deployment
from halimede_operator.core.children.disruption_budget import disruption_budget
from halimede_operator.core.children.metadata import sealed
from halimede_operator.core.children.network_policy import network_policy
from halimede_operator.core.children.pod import pod_template
from halimede_operator.core.children.service_account import service_account
from halimede_operator.core.children.services import pods_service, service
from halimede_operator.core.children.source import source_of
from halimede_operator.core.labels import PLACEMENT, POD_SETTINGS
from halimede_operator.core.names import child_name
from halimede_operator.core.placement.choice import Placement, read_placement
from halimede_operator.core.platform import Platform
from halimede_operator.core.revisions.pod_settings import written
from halimede_operator.core.revisions.revision import Revision, revision
from halimede_operator.core.revisions.rollback import RolledBack
from halimede_operator.core.scaling.replicas import Replicas
from halimede_operator.core.snapshot import Object
from halimede_operator.core.spec.types import Json, Key, ModelSpec, RolloutPolicy, Spec, Workload


def build(
    key: Key,
    spec: Spec,
    members: Mapping[str, ModelSpec],
    platform: Platform,
    placement: Placement | None,
    annotations: Mapping[str, str],
) -> Revision:
    """The revision that this operator makes from a spec.

    members: all InferenceModels of an ensemble by object name, empty for a model; raises KeyError if one is missing.
    They must have no `member_problems`. placement: the devices of the pods; None without an accelerator. annotations:
    where the revision comes from.
    """
    workload = spec.workload
    content = content_of(spec, members)
    sources = tuple(source_of(model, platform) for model in content.models)
    account = workload.service_account_name or child_name(key.name)
    return revision(
        fetch_plan(content, sources, workload, platform),
        pod_template(key, workload, platform, sources, account, placement),
        {**annotations, POD_SETTINGS: written(platform)},
    )


def desired(
    key: Key,
    uid: str,
    workload: Workload,
    platform: Platform,
    revision: Revision,
    policy: RolloutPolicy,
    replicas: Replicas,
    rolled_back: RolledBack | None = None,
    *,
    hpa_may_be_zero: bool = True,
) -> tuple[Object, ...]:
    """The children. Equal arguments give equal objects.

    uid: of the object. policy: not Auto. rolled_back: what was rolled back to this revision. hpa_may_be_zero: the API
    server accepts an HPA with 0 as minReplicas.
    """
    scaling = workload.autoscaling
    config = config_map(key, uid, revision)
    children: list[Json] = [config]
    if workload.service_account_name is None:
        children.append(service_account(key, uid))
    placement = read_placement(revision.annotations.get(PLACEMENT, ""))
    if placement is not None and placement.claim is not None:
        children.append(claim_template(key, uid, placement.claim))
    children += [pods_service(key, uid, workload.serving), service(key, uid, workload.serving)]
    if workload.network_policy:
        children.append(network_policy(key, uid, workload, platform.operator_namespace, platform.metrics_collectors))
    config_name = config["metadata"]["name"]
    children.append(deployment(key, uid, workload, revision, config_name, rolled_back, policy, replicas.applied))
    if scaling is not None and not workload.suspend:
        made = scaler(key, uid, scaling, may_be_zero=hpa_may_be_zero)
        children += [made] if made is not None else []
    most = workload.replicas if scaling is None else scaling.max_replicas
    if most > 1 and workload.max_unavailable is not None:
        children.append(disruption_budget(key, uid, workload.max_unavailable))
    return tuple(sealed(child) for child in children)


def template_without_devices(key: Key, spec: Spec, members: Mapping[str, ModelSpec], platform: Platform) -> Json:
    """The pod template as far as it does not depend on the devices, for the decision about these."""
    sources = tuple(source_of(model, platform) for model in content_of(spec, members).models)
    return pod_template(key, spec.workload, platform, sources, "", None)
