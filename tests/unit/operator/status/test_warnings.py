"""Each Warning event about a pod or its claims, by the component that writes it, and the reason in the object's status.

Most of them repeat what a status has, so no event is read for them. The others are read (`kubelet_events`).
"""

from dataclasses import replace

import pytest

from halimede_operator.core.pods.kubelet_events import START_WARNINGS
from halimede_operator.core.pods.volume_claims import volume_claim
from halimede_operator.core.snapshot import Object, Snapshot
from support.operator_pods import (
    back_off,
    deployment,
    ended,
    lost_readiness,
    node_lost,
    pod,
    rejected,
    second,
    snapshot,
    stopped,
    unscheduled,
    waiting,
)
from support.operator_specs import model_key, model_spec
from support.operator_status import NAME, NO_GPU, REJECTED, condition_state, message, ready_state, status_for

SANDBOX = "8d0c" * 16
CNI = (
    f'Failed to create pod sandbox: rpc error: code = Unknown desc = failed to setup network for sandbox "{SANDBOX}": '
    'plugin type="calico" failed (add): error getting ClusterInformation: connection is unauthorized'
)
QUOTA = 'pods "bert-7f9c66d5b8-zn6zz" is forbidden: exceeded quota: q, requested: pods=1, used: pods=2, limited: pods=2'
MOUNTS_CLAIM = [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}]
UNBOUND = "0/2 nodes are available: pod has unbound immediate PersistentVolumeClaims. not found"
NO_RUNTIME = 'RuntimeHandler "nvidia" not supported'


def of_kubelet(reason: str, text: str) -> Snapshot:
    event = {"type": "Warning", "reason": reason, "lastTimestamp": second(30), "message": text}
    return seen(pod(has_sandbox=False), kubelet_events={f"uid-{NAME}": (event,)})


def seen(*pods: Object, **fields: object) -> Snapshot:
    return snapshot(model_key(), *pods, child=deployment(), **fields)


def without_claim() -> Snapshot:
    """A pod whose ResourceClaim cannot be made."""
    made = unscheduled("")
    made["spec"]["resourceClaims"] = [{"name": "accelerator", "resourceClaimTemplateName": "bert-1"}]
    made["status"] = {"phase": "Pending"}
    text = "PodResourceClaim accelerator: failed to create ResourceClaim: exceeded quota: q"
    event = {"type": "Warning", "reason": "FailedResourceClaimCreation", "lastTimestamp": second(30), "message": text}
    return seen(made, kubelet_events={f"uid-{NAME}": (event,)})


def claiming(text: str, *claims: tuple[str, Object | None]) -> Snapshot:
    """A pod that mounts the claim `models` and has no node. claims: those that were read, with their last event."""
    read = {name: None if claim is None else volume_claim(claim, claim["events"]) for name, claim in claims}
    return seen(unscheduled(text, volumes=MOUNTS_CLAIM), volume_claims=read)


def claim(storage_class: str | None, reason: str = "", text: str = "", phase: str = "Pending") -> tuple[str, Object]:
    events = [
        {"reason": "Normal", "lastTimestamp": second(1), "message": "waiting for a volume to be created"},
        {"reason": reason, "lastTimestamp": second(9), "message": text},
    ]
    spec = {} if storage_class is None else {"storageClassName": storage_class}
    return "models", {"spec": spec, "status": {"phase": phase}, "events": events if reason else ()}


FULL = 'failed to provision volume with StorageClass "fast": rpc error: code = ResourceExhausted desc = no space left'
WARNINGS: dict[tuple[str, str], tuple[Snapshot, str, str]] = {
    ("scheduler", "FailedScheduling"): (seen(unscheduled("0/2 nodes are available: 2 Insufficient cpu.")), "Unschedulable", "Insufficient cpu"),
    ("scheduler", "FailedScheduling, of devices"): (seen(unscheduled(NO_GPU)), "InsufficientDevices", "Insufficient nvidia.com/mig-1g.5gb."),
    ("controller-manager", "FailedCreate, by a quota"): (seen(refused_pods=(QUOTA,)), "QuotaExceeded", "exceeded quota: q"),
    ("controller-manager", "FailedCreate, by a rule"): (seen(refused_pods=('pods "a" is forbidden: no PriorityClass with name x was found',)), "PodsRefused", "no PriorityClass"),
    ("controller-manager", "NodeNotReady"): (seen(node_lost()), "NodeLost", "does not answer"),
    ("controller-manager", "FailedResourceClaimCreation"): (without_claim(), "DevicePreparationFailed", "failed to create ResourceClaim"),
    ("controller-manager", "FailedAttachVolume"): (of_kubelet("FailedAttachVolume", 'Multi-Attach error for volume "pvc-1" Volume is already used by pod(s) a'), "VolumeMountFailed", "Multi-Attach error"),
    ("controller-manager", "FailedBinding"): (claiming(UNBOUND, claim("", "FailedBinding", "no persistent volumes available for this claim and no storage class is set")), "ClaimUnbound", "PersistentVolumeClaim models (without a StorageClass) is not bound: no persistent volumes available"),
    ("controller-manager", "ProvisioningFailed"): (claiming(UNBOUND, claim("gone", "ProvisioningFailed", 'storageclass.storage.k8s.io "gone" not found')), "ClaimUnbound", 'PersistentVolumeClaim models (StorageClass gone) is not bound: storageclass.storage.k8s.io "gone" not found'),
    ("controller-manager", "ClaimLost"): (claiming(UNBOUND, claim("fast", "ClaimLost", "Bound claim has lost its PersistentVolume.", "Lost")), "ClaimUnbound", "Bound claim has lost"),
    ("CSI", "ProvisioningFailed"): (claiming(UNBOUND, claim("fast", "ProvisioningFailed", FULL)), "ClaimUnbound", "no space left"),
    ("CSI", "FailedAttachVolume"): (of_kubelet("FailedAttachVolume", 'AttachVolume.Attach failed for volume "pvc-1" : rpc error: code = NotFound'), "VolumeMountFailed", "AttachVolume.Attach failed"),
    ("CSI", "FailedMount"): (of_kubelet("FailedMount", 'MountVolume.MountDevice failed for volume "pvc-1" : driver name ebs.csi.aws.com not found in the list of registered CSI drivers'), "VolumeMountFailed", "ebs.csi.aws.com"),
    ("kubelet", "FailedMount"): (of_kubelet("FailedMount", 'MountVolume.SetUp failed for volume "keys" : secret "keys" not found'), "SecretMissing", 'secret "keys" not found'),
    ("kubelet", "FailedMapVolume"): (of_kubelet("FailedMapVolume", 'MapVolume.MapPodDevice failed for volume "raw" : no loop device'), "VolumeMountFailed", "no loop device"),
    ("kubelet", "FailedMountOnFilesystemMismatch"): (of_kubelet("FailedMountOnFilesystemMismatch", "Unexpected filesystem"), "VolumeMountFailed", "Unexpected filesystem"),
    ("kubelet", "FailedPrepareDynamicResources"): (of_kubelet("FailedPrepareDynamicResources", "Failed to prepare dynamic resources: DRA driver gpu.nvidia.com is not registered"), "DevicePreparationFailed", "gpu.nvidia.com is not registered"),
    ("kubelet", "FailedCreatePodSandBox"): (of_kubelet("FailedCreatePodSandBox", CNI), "SandboxFailed", 'plugin type="calico" failed (add)'),
    ("kubelet", "FailedCreatePodSandBox, by the runtime"): (of_kubelet("FailedCreatePodSandBox", NO_RUNTIME), "SandboxFailed", NO_RUNTIME),
    ("kubelet", "FailedPodSandBoxStatus"): (of_kubelet("FailedPodSandBoxStatus", "Unable to get pod sandbox status: context deadline exceeded"), "SandboxFailed", "deadline exceeded"),
    ("kubelet", "NetworkNotReady"): (of_kubelet("NetworkNotReady", "network is not ready: container runtime network not ready: cni plugin not initialized"), "SandboxFailed", "cni plugin not initialized"),
    ("kubelet", "FailedCreatePodContainer"): (of_kubelet("FailedCreatePodContainer", "unable to ensure pod container exists: failed to create container for [kubepods]"), "SandboxFailed", "unable to ensure pod container exists"),
    ("kubelet", "FailedSync"): (of_kubelet("FailedSync", "error determining status: rpc error: code = Unavailable"), "SandboxFailed", "error determining status"),
    ("kubelet", "Failed, of an image"): (seen(stopped(waiting("ErrImagePull", "pull access denied"))), "ImagePullFailed", "pull access denied"),
    ("kubelet", "InspectFailed"): (seen(stopped(waiting("InvalidImageName", "invalid reference format"))), "ImagePullFailed", "invalid reference format"),
    ("kubelet", "ErrImageNeverPull"): (seen(stopped(waiting("ErrImageNeverPull", "is not present with pull policy of Never"))), "ImagePullFailed", "pull policy of Never"),
    ("kubelet", "Failed, of a configuration"): (seen(stopped(waiting("CreateContainerConfigError", "image will run as root"))), "ContainerConfigError", "image will run as root"),
    ("kubelet", "Failed, of a start"): (seen(stopped(waiting("CreateContainerError", "failed to reserve container name"))), "ContainerStartFailed", "failed to reserve container name"),
    ("kubelet", "FailedPostStartHook"): (seen(stopped(waiting("PostStartHookError", "no"))), "ContainerStartFailed", "PostStartHookError: no"),
    ("kubelet", "BackOff"): (seen(stopped(back_off(NAME), last=ended(3, "no config"))), "CrashLoop", "no config"),
    ("kubelet", "Unhealthy"): (seen(lost_readiness()), "ProbeFailed", "readiness probe fails"),
    ("kubelet", "Evicted"): (seen(rejected("Evicted", "The node was low on resource: memory.")), "Evicted", "low on resource"),
    ("kubelet", "UnexpectedAdmissionError"): (seen(rejected("UnexpectedAdmissionError", REJECTED)), "InsufficientDevices", "devices unavailable"),
    ("kubelet", "OutOfcpu"): (seen(rejected("OutOfcpu", "Node didn't have enough resource: cpu")), "PodFailed", "OutOfcpu"),
    ("kubelet", "TopologyAffinityError"): (seen(rejected("TopologyAffinityError", "Resources cannot be allocated with Topology locality")), "PodFailed", "Topology"),
}  # fmt: skip


@pytest.mark.parametrize("case", WARNINGS, ids=" ".join)
def test_each_warning_about_a_pod_has_a_reason(case: tuple[str, str]):
    found, reason, words = WARNINGS[case]
    status = status_for(found, model_spec())
    assert ready_state(status)[:2] == ("False", reason)
    assert words in message(status)


def test_a_pod_without_its_resource_claim_does_not_wait_for_a_scheduler():
    """The scheduler does not look at it before the claim is made."""
    found = replace(without_claim(), kubelet_events={})
    assert ready_state(status_for(found, model_spec()))[1] == "Scheduling"


def test_every_event_that_is_read_has_a_row():
    assert {reason.partition(",")[0] for _, reason in WARNINGS} >= set(START_WARNINGS)


def test_attempts_to_make_a_sandbox_have_one_message():
    """The sandbox has another name at every attempt, and kubelets combine the events of many."""
    statuses = [
        status_for(of_kubelet("FailedCreatePodSandBox", text), model_spec())
        for text in (CNI, CNI.replace(SANDBOX, "0f" * 32), f"(combined from similar events): {CNI}")
    ]
    assert statuses == [statuses[0]] * 3


def test_a_failed_sandbox_ends_the_failures_of_volumes():
    """A kubelet makes the sandbox when all volumes are mounted."""
    mount = {"reason": "FailedMount", "lastTimestamp": second(20), "message": 'secret "keys" not found'}
    sandbox = {"reason": "FailedCreatePodSandBox", "lastTimestamp": second(30), "message": CNI}
    for events in ((mount, sandbox), (sandbox, mount)):
        found = seen(pod(has_sandbox=False), kubelet_events={f"uid-{NAME}": events})
        assert ready_state(status_for(found, model_spec()))[1] == "SandboxFailed"


NOT_FOUND = '0/2 nodes are available: persistentvolumeclaim "models" not found. not found'
CLAIMS = {
    "missing": (NOT_FOUND, (("models", None),), "ClaimMissing", "PersistentVolumeClaim models does not exist"),
    "no default class": (UNBOUND, (claim(None),), "ClaimUnbound", "PersistentVolumeClaim models (without a StorageClass, and the cluster has no default one) is not bound"),
    "not read": (NOT_FOUND, (), "Unschedulable", NOT_FOUND.removesuffix(" not found")),
    "bound meanwhile": (UNBOUND, (claim("fast", phase="Bound"),), "Unschedulable", UNBOUND.removesuffix(" not found")),
    "not the cause": ("0/2 nodes are available: 2 Insufficient cpu.", (claim("fast"),), "Unschedulable", "0/2 nodes are available: 2 Insufficient cpu."),
}  # fmt: skip


@pytest.mark.parametrize("case", CLAIMS)
def test_a_claim_without_a_volume_is_named_before_the_schedulers_words(case: str):
    scheduler, claims, reason, text = CLAIMS[case]
    status = status_for(claiming(scheduler, *claims), model_spec())
    assert ready_state(status) == ("False", reason, f"0/1 replicas serving: pod {NAME}: {text}")
    assert condition_state(status, "Placed") == ("False", reason)
    named = "" if reason == "Unschedulable" else f"{text}; "
    assert message(status, "Placed") == f"pod {NAME}: {named}{scheduler}"
