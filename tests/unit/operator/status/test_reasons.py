"""Why an object is not ready: pods as Kubernetes 1.36 writes them, and the reported reason."""

import pytest

from halimede_operator.core.snapshot import Object
from halimede_operator.core.spec.types import Workload
from support.operator_pods import (
    IMAGE,
    NEW,
    OLD,
    back_off,
    container,
    deployment,
    ended,
    fetch_failed,
    fetched,
    fetching,
    leaving,
    loading,
    lost_readiness,
    node_lost,
    pod,
    rejected,
    replica_set,
    running,
    serving,
    snapshot,
    stopped,
    unscheduled,
    waiting,
)
from support.operator_specs import model_key, model_spec
from support.operator_status import (
    FETCH,
    LOG,
    NAME,
    NO_GPU,
    NOW,
    ON,
    REJECTED,
    SERVER,
    condition_state,
    ready_state,
    status_for,
)

PULL = 'failed to pull and unpack image "x": failed to resolve reference "x": dial tcp: lookup x on 10.0.0.1:53: '
JSON_LOG = (
    'ime":"2026-11-22T09:12:28.198Z","level":"ERROR","message":"cut off"}\n'
    '{"time":"2026-11-22T09:12:28.209Z","level":"ERROR","message":"failed to load: Traceback (most recent call last):\\n  File \\"a\\"\\nValueError: no weights\\n"}\n'
    '{"time":"2026-11-22T09:12:28.218Z","level":"INFO","message":"table of Option, Value"}\n'
)  # fmt: skip
LOAD_SAID = (
    "failed to load 'bert' version 1: Internal: no weights; creating server: Internal - failed to load all models: bert"
)
NO_CLAIM = (
    "0/2 nodes are available: 2 cannot allocate all claims. still not schedulable, preemption: 0/2 nodes are available."
)
NO_CLASS = "0/2 nodes are available: resourceclaim bert-1: request device: device class mig.nvidia.com does not exist."
CASES = {
    "no node has the device": (unscheduled(NO_GPU), "Placed", "InsufficientDevices", f"pod {NAME}: 0/2 nodes are available: 2 Insufficient nvidia.com/mig-1g.5gb."),
    "no node has a device for its claim": (unscheduled(NO_CLAIM), "Placed", "InsufficientDevices", f"pod {NAME}: 0/2 nodes are available: 2 cannot allocate all claims."),
    "no such device class": (unscheduled(NO_CLASS), "Placed", "Unschedulable", f"pod {NAME}: {NO_CLASS}"),
    "taints": (
        unscheduled("0/2 nodes are available: 2 node(s) had untolerated taint(s)."),
        "Placed",
        "Unschedulable",
        f"pod {NAME}: 0/2 nodes are available: 2 node(s) had untolerated taint(s).",
    ),
    "a claim that is not there": (
        unscheduled('0/2 nodes are available: persistentvolumeclaim "models" not found. not found'),
        "Placed",
        "Unschedulable",
        f'pod {NAME}: 0/2 nodes are available: persistentvolumeclaim "models" not found.',
    ),
    "no right to the store": (fetch_failed(10, "s3://m/bert: AccessDenied"), "ModelFetched", "ModelFetchFailed", f"{FETCH}: not allowed: s3://m/bert: AccessDenied, trying again"),
    "no such model": (fetch_failed(11, "s3://m/bert: NoSuchKey"), "ModelFetched", "ModelFetchFailed", f"{FETCH}: not found: s3://m/bert: NoSuchKey, trying again"),
    "other files": (fetch_failed(12, "sha256:1 is not sha256:2"), "ModelFetched", "ModelFetchFailed", f"{FETCH}: digest mismatch: sha256:1 is not sha256:2"),
    "no room": (fetch_failed(13, "4 GB needed"), "ModelFetched", "ModelFetchFailed", f"{FETCH}: disk full: 4 GB needed"),
    "no model": (fetch_failed(14, "a folder of pictures"), "ModelFetched", "InvalidModel", f"{FETCH}: not a model: a folder of pictures"),
    "no store": (fetch_failed(15, "no route"), "ModelFetched", "ModelFetchFailed", f"{FETCH}: unreachable: no route, trying again"),
    "no store, and it is tried again": (fetching(last=ended(15, "no route")), "ModelFetched", "ModelFetchFailed", f"{FETCH}: unreachable: no route, trying again"),
    "a fetch that dies": (fetch_failed(139), "ModelFetched", "ModelFetchFailed", f"{FETCH}: exited with code 139 (SIGSEGV)"),
    "a fetch out of memory": (
        pod(fetch=container("fetch", ended(137, "Killed\n", reason="OOMKilled"))),
        "ModelFetched",
        "OutOfMemory",
        f"{FETCH}: killed by the kernel: out of memory; it has no memory limit of its own",
    ),
    "a fetch that is tried again": (
        pod(fetch=container("fetch", back_off(NAME, "fetch"), ended(11, "NoSuchKey"), restarts=3)),
        "ModelFetched",
        "ModelFetchFailed",
        f"{FETCH}: not found: NoSuchKey, trying again",
    ),
    "the fetch container's image": (
        pod(fetch=container("fetch", waiting("ErrImagePull", PULL + "i/o timeout"))),
        "ModelFetched",
        "ImagePullFailed",
        f"{FETCH}: {PULL}i/o timeout",
    ),
    "an image that is not there": (stopped(waiting("ErrImagePull", PULL + "no such host")), "ModelLoaded", "ImagePullFailed", f"{SERVER}: {PULL}no such host"),
    "an image that is waited for": (
        stopped(waiting("ImagePullBackOff", f'Back-off pulling image "{IMAGE}": ErrImagePull: {PULL}no such host')),
        "ModelLoaded",
        "ImagePullFailed",
        f"{SERVER}: {PULL}no such host",
    ),
    "no image": (
        stopped(waiting("InvalidImageName", 'Failed to apply default image tag "A::x": invalid reference format')),
        "ModelLoaded",
        "ImagePullFailed",
        f'{SERVER}: Failed to apply default image tag "A::x": invalid reference format',
    ),
    "an image that must be there": (
        stopped(waiting("ErrImageNeverPull", 'Container image "x" is not present with pull policy of Never')),
        "ModelLoaded",
        "ImagePullFailed",
        f'{SERVER}: Container image "x" is not present with pull policy of Never',
    ),
    "a Secret that is not there": (
        stopped(waiting("CreateContainerConfigError", 'secret "missing" not found')),
        "ModelLoaded",
        "SecretMissing",
        f'{SERVER}: secret "missing" not found',
    ),
    "a ConfigMap that is not there": (
        stopped(waiting("CreateContainerConfigError", 'configmap "missing" not found')),
        "ModelLoaded",
        "ConfigMapMissing",
        f'{SERVER}: configmap "missing" not found',
    ),
    "a key that is not there": (
        stopped(waiting("CreateContainerConfigError", "couldn't find key TOKEN in Secret prod/keys")),
        "ModelLoaded",
        "ContainerConfigError",
        f"{SERVER}: couldn't find key TOKEN in Secret prod/keys",
    ),
    "an image of root": (
        stopped(waiting("CreateContainerConfigError", f'container has runAsNonRoot and image will run as root (pod: "{NAME}_prod(6ce3d11c-cb39-4c41-bb8c-419f96609ae0)", container: server)')),
        "ModelLoaded",
        "ContainerConfigError",
        f'{SERVER}: container has runAsNonRoot and image will run as root (pod: "{NAME}", container: server)',
    ),
    "no such command": (
        stopped(waiting("RunContainerError", "runc create failed: exec: no such file"), last=ended(128, "runc create failed: exec: no such file", reason="StartError")),
        "ModelLoaded",
        "ContainerStartFailed",
        f"{SERVER}: StartError: runc create failed: exec: no such file",
    ),
    "a hook that fails": (stopped(waiting("PostStartHookError", "no")), "ModelLoaded", "ContainerStartFailed", f"{SERVER}: PostStartHookError: no"),
    "a model that does not load": (stopped(ended(1, LOG)), "ModelLoaded", "ModelLoadFailed", f"{SERVER}: exited with code 1: {LOAD_SAID}"),
    "a log of JSON lines": (stopped(ended(1, JSON_LOG)), "ModelLoaded", "ModelLoadFailed", f"{SERVER}: exited with code 1: failed to load: ValueError: no weights"),
    "a message of its own": (stopped(ended(1, "failed to load 'bert': no weights\n")), "ModelLoaded", "ModelLoadFailed", f"{SERVER}: exited with code 1: failed to load 'bert': no weights"),
    "another command that fails": (
        stopped(ended(1, "sleep: unrecognized option: model-repository=/models\n")),
        "ModelLoaded",
        "CrashLoop",
        f"{SERVER}: exited with code 1: sleep: unrecognized option: model-repository=/models",
    ),
    "a server out of memory": (
        stopped(back_off(NAME), last=ended(137, "Killed\n", reason="OOMKilled")),
        "ModelLoaded",
        "OutOfMemory",
        f"{SERVER}: killed by the kernel: out of memory; it has no memory limit of its own",
    ),
    "a server that crashes": (stopped(ended(139, "segmentation fault")), "ModelLoaded", "CrashLoop", f"{SERVER}: exited with code 139 (SIGSEGV): segmentation fault"),
    "a wrong flag": (stopped(ended(2, "Error: no such option: --x")), "ModelLoaded", "CrashLoop", f"{SERVER}: exited with code 2: Error: no such option: --x"),
    "a server that just ends": (stopped(ended(0)), "ModelLoaded", "CrashLoop", f"{SERVER}: exited with code 0"),
    "a server that ends after it served": (
        stopped(ended(1, "address in use", started=5), unready_since=30),
        "ModelLoaded",
        "CrashLoop",
        f"{SERVER}: exited with code 1: address in use",
    ),
    "a crash that the kubelet forgot": (stopped(back_off(NAME)), "ModelLoaded", "CrashLoop", f"{SERVER}: back-off restarting failed container=server pod={NAME}"),
    "a probe that fails": (lost_readiness(), "Available", "ProbeFailed", f"{SERVER}: it runs, and its readiness probe fails"),
    "a node that is gone": (node_lost(), "Available", "NodeLost", f"pod {NAME}: its node node-1 does not answer."),
    "a device that the node lost": (rejected("UnexpectedAdmissionError", REJECTED), "Placed", "InsufficientDevices", f"pod {NAME} on node node-1: UnexpectedAdmissionError: {REJECTED}"),
    "an eviction": (rejected("Evicted", "The node was low on resource: memory."), "Placed", "Evicted", f"pod {NAME} on node node-1: Evicted: The node was low on resource: memory."),
    "a node that shuts down": (rejected("NodeShutdown", "Pod was rejected as the node is shutting down."), "Placed", "PodFailed", f"pod {NAME} on node node-1: NodeShutdown: Pod was rejected as the node is shutting down."),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_each_failure_of_a_pod_has_its_reason(case: str):
    pod_, type_, reason, message = CASES[case]

    status = status_for(snapshot(model_key(), pod_, child=deployment()), model_spec())

    assert ready_state(status) == ("False", reason, f"0/1 replicas serving: {message}")
    assert condition_state(status, type_) == ("False", reason)
    assert condition_state(status, "Reconciling") == ("True", reason)
    assert status["lastFailure"]["reason"] == reason
    assert status["lastFailure"]["message"] == message
    assert status["lastFailure"]["pod"] == NAME


WAITS = {
    "for its pods": ((), "Pending", "the pods are being made", "Pending"),
    "for the network and the volumes": (
        (
            pod(
                has_sandbox=False,
                volumes=[
                    {"name": "a", "secret": {"secretName": "models-s3"}},
                    {"name": "b", "configMap": {"name": "corp-ca"}},
                    {"name": "c", "persistentVolumeClaim": {"claimName": "models"}},
                    {"name": "d", "secret": {"secretName": "not-needed", "optional": True}},
                ],
            ),
        ),
        "Fetching",
        f"{ON} waits for its network and its volumes, which need Secret models-s3, ConfigMap corp-ca, PersistentVolumeClaim models",
        "Fetching",
    ),
    "for the fetch to start": ((pod(),), "Fetching", f"{ON} pulls its image and fetches the model", "Fetching"),
    "for the fetch": ((fetching(),), "Fetching", f"{ON} pulls its image and fetches the model", "Fetching"),
    "for the server to start": ((pod(fetch=fetched()),), "Loading", f"{ON} starts the server and loads the model", "Loading"),
    "for the model": ((loading(),), "Loading", f"{ON} starts the server and loads the model", "Loading"),
    "for the slower pod": ((fetching(f"bert-{NEW}-bbbbb"), loading()), "Fetching", f"pod bert-{NEW}-bbbbb on node node-1 pulls its image and fetches the model", "Fetching"),
}  # fmt: skip


@pytest.mark.parametrize("case", WAITS)
def test_normal_startup_stages_are_no_failure(case: str):
    pods, reason, message, phase = WAITS[case]

    status = status_for(snapshot(model_key(), *pods, child=deployment()), model_spec())

    assert ready_state(status) == ("False", reason, f"0/1 replicas serving: {message}")
    assert status["phase"] == phase
    assert "lastFailure" not in status


def test_a_started_pod_that_is_not_ready_yet_is_no_failure():
    """A kubelet writes this between the startup probe and the first readiness probe."""
    server = {**container("server", running(5)), "started": True}
    just_up = pod(fetch=fetched(), server=server)

    status = status_for(snapshot(model_key(), just_up, child=deployment()), model_spec())

    assert ready_state(status) == (
        "False",
        "Loading",
        f"0/1 replicas serving: {ON} starts the server and loads the model",
    )


def test_a_pod_that_waits_for_a_readiness_gate_is_not_lost():
    gated = node_lost()
    gated["spec"]["readinessGates"] = [{"conditionType": "example.com/routed"}]
    status = status_for(snapshot(model_key(), gated, child=deployment()), model_spec())

    expected = f"0/1 replicas serving: {ON} has loaded the model and is about to be ready"
    assert ready_state(status) == ("False", "Loading", expected)


@pytest.mark.parametrize(
    "reported",
    [{"phase": "Unknown"}, {"reason": "NodeLost", "phase": "Running"}, {"reason": "NodeLost", "phase": "Failed"}],
)
def test_a_lost_node_is_reported_in_each_form_of_pod_status(reported: Object):
    lost = pod(fetch=fetched(), server=container("server", running(5)))
    lost["status"] |= reported
    status = status_for(snapshot(model_key(), lost, child=deployment()), model_spec())

    assert ready_state(status)[:2] == ("False", "NodeLost")


def test_the_end_of_a_long_log_is_used():
    old, new = (f'E1122 09:12:25.7 1 a.py:1] "{word}"\n' for word in ("old", "new"))
    log = old + 'I1122 09:12:25.7 1 a.py:1] "on and on"\n' * 300 + new
    status = status_for(snapshot(model_key(), stopped(ended(1, log)), child=deployment()), model_spec())

    assert ready_state(status)[2] == f"0/1 replicas serving: {SERVER}: exited with code 1: new"


def test_a_succeeded_init_container_that_runs_again_is_no_failure():
    again = pod(fetch=container("fetch", running(50), ended(0, "{}")))
    status = status_for(snapshot(model_key(), again, child=deployment()), model_spec())

    assert ready_state(status)[1] == "Fetching"


AT_REST = {
    "Error 403: <RequestId>4442587FB7D0A2F9</RequestId>": "Error 403: <RequestId …</RequestId>",
    "x-amz-request-id: 4442587FB7D0A2F9 was refused": "x-amz-request-id … was refused",
    "certificate has expired: current time 2026-11-22T09:00:00Z is after it": "certificate has expired: current time <time> is after it",
    "2026-11-22 09:00:00,123 no weights": "<time> no weights",
    "Traceback (most recent call last):\n  File x\nKeyError: 'a'\n": "KeyError: 'a'",
    "2026-11-22T09:12:25Z E 1 app.py:212] no weights\n2026-11-22T09:12:25Z I 1 app.py:213] bye": "no weights",
    'E1122 09:12:25.7 1 a.py:1] "no weights"\nE1122 09:12:25.8 1 a.py:1] "no weights"': "no weights",
}  # fmt: skip


@pytest.mark.parametrize("text", AT_REST)
def test_parts_that_change_at_every_attempt_are_not_reported(text: str):
    status = status_for(snapshot(model_key(), fetch_failed(10, text), child=deployment()), model_spec())

    assert ready_state(status)[2] == f"0/1 replicas serving: {FETCH}: not allowed: {AT_REST[text]}, trying again"


@pytest.mark.parametrize("fetch", [ended(16, "it answers"), back_off(NAME, "fetch"), running(2)])
def test_a_store_that_answers_again_is_no_failure(fetch: Object):
    before = {} if "terminated" in fetch else ended(16, "it answers")
    status = status_for(
        snapshot(model_key(), pod(fetch=container("fetch", fetch, before)), child=deployment()),
        model_spec(),
    )  # fmt: skip

    assert ready_state(status)[:2] == ("False", "Fetching")
    assert "lastFailure" not in status


def test_a_crash_loop_has_the_same_status_at_each_step():
    crash, before = ended(1, LOG, started=30, finished=31), ended(1, LOG, started=20, finished=21)
    turns = [
        stopped(crash, last=before),
        stopped(back_off(NAME, pause="10s"), last=crash),
        stopped(back_off(NAME, pause="2m40s"), last=crash),
        loading(last=crash),
    ]
    statuses = [status_for(snapshot(model_key(), turn, child=deployment()), model_spec()) for turn in turns]

    assert statuses == [statuses[0]] * 4
    assert statuses[0]["lastFailure"] == {
        "reason": "ModelLoadFailed",
        "message": f"{SERVER}: exited with code 1: {LOAD_SAID}",
        "pod": NAME,
        "container": "server",
        "exitCode": 1,
        "time": "2026-11-22T09:00:31Z",
    }


def test_a_failing_image_pull_has_the_same_status_all_the_time():
    messages = [PULL + f"read udp 10.244.0.12:{port}->10.255.255.53:53: i/o timeout" for port in (43588, 50658)]
    turns = [
        stopped(waiting("ErrImagePull", messages[0])),
        stopped(waiting("ImagePullBackOff", f'Back-off pulling image "{IMAGE}": ErrImagePull: {messages[0]}')),
        stopped(waiting("ErrImagePull", messages[1])),
    ]
    statuses = [status_for(snapshot(model_key(), turn, child=deployment()), model_spec()) for turn in turns]

    assert statuses == [statuses[0]] * 3


QUOTA = 'pods "bert-7f9c66d5b8-%s" is forbidden: exceeded quota: q, requested: pods=1, used: pods=2, limited: pods=2'
SECURITY = 'pods "bert-7f9c66d5b8-%s" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot != true'


@pytest.mark.parametrize(("text", "reason"), [(QUOTA, "QuotaExceeded"), (SECURITY, "PodsRefused")])
def test_pods_that_a_quota_or_policy_refuses_are_reported(text: str, reason: str):
    statuses = [
        status_for(snapshot(model_key(), child=deployment(), refused_pods=(text % name,)), model_spec())
        for name in ("zn6zz", "x7k2p")
    ]
    assert statuses[0] == statuses[1]
    assert ready_state(statuses[0]) == ("False", reason, "0/1 replicas serving: " + text % "…")
    assert condition_state(statuses[0], "Placed") == ("False", reason)


def test_a_quota_message_without_missing_pods_is_not_reported():
    seen = snapshot(model_key(), serving(), child=deployment(), refused_pods=(QUOTA % "zn6zz",))

    assert ready_state(status_for(seen, model_spec())) == (
        "True",
        "Serving",
        "1/1 replicas serving version 1",
    )


def test_another_container_of_the_pod_that_fails_is_named():
    made = serving()
    made["status"]["containerStatuses"].append(container("proxy", ended(3, "no config")))
    made["status"]["conditions"][2]["status"] = made["status"]["conditions"][3]["status"] = "False"
    status = status_for(snapshot(model_key(), made, child=deployment()), model_spec())

    expected = f"pod {NAME}: container proxy (image {IMAGE}): exited with code 3: no config"
    assert ready_state(status) == ("False", "CrashLoop", f"0/1 replicas serving: {expected}")


WORST = {
    "the root cause before a lack of room": (unscheduled(NO_GPU), stopped(ended(1, LOG), "bert-1-b"), "ModelLoadFailed", "bert-1-b"),
    "of equals the oldest": (fetch_failed(11, "a", "bert-1-a", created=9), fetch_failed(11, "a", "bert-1-b"), "ModelFetchFailed", "bert-1-b"),
    "of the same age the first name": (fetch_failed(11, "a", "bert-1-b"), fetch_failed(11, "a", "bert-1-a"), "ModelFetchFailed", "bert-1-a"),
    "the newest template before a worse reason": (stopped(ended(1, LOG), "bert-1-a", template=OLD), fetch_failed(11, "a", "bert-1-b"), "ModelFetchFailed", "bert-1-b"),
    "not of a pod that is leaving": (leaving(stopped(ended(1, LOG), "bert-1-a")), fetch_failed(11, "a", "bert-1-b"), "ModelFetchFailed", "bert-1-b"),
    "not of a template before that is over": (rejected("UnexpectedAdmissionError", REJECTED, "bert-1-a", created=9, template=OLD), unscheduled("no room", "bert-1-b"), "Unschedulable", "bert-1-b"),
    "not of one that is over and is leaving": (leaving(rejected("UnexpectedAdmissionError", REJECTED, "bert-1-a")), unscheduled("no room", "bert-1-b"), "Unschedulable", "bert-1-b"),
    "of one that is over": (rejected("UnexpectedAdmissionError", REJECTED, "bert-1-a"), unscheduled("no room", "bert-1-b"), "InsufficientDevices", "bert-1-a"),
    "of a template before where there is no other": (stopped(ended(1, LOG), "bert-0-a", template=OLD), stopped(ended(1, LOG), "bert-0-b", template=OLD, created=9), "ModelLoadFailed", "bert-0-a"),
    "not of a pod that was replaced": (rejected("Evicted", "low on memory", "bert-1-a", created=1), fetch_failed(11, "a", "bert-1-b", created=2), "ModelFetchFailed", "bert-1-b"),
}  # fmt: skip


@pytest.mark.parametrize("case", WORST)
def test_the_worst_failure_is_reported_in_any_order_of_pods(case: str):
    first, second, reason, name = WORST[case]
    spec = model_spec(workload=Workload(replicas=2))
    sets = (replica_set(OLD, 9), replica_set(NEW, 10))
    one, other = (
        status_for(snapshot(model_key(), *pods, child=deployment(2), replica_sets=sets), spec)
        for pods in ((first, second), (second, first))
    )
    assert one == other
    assert (ready_state(one)[1], one["lastFailure"]["pod"]) == (reason, name)


def test_an_eviction_is_reported_until_the_next_pod_starts():
    evicted = rejected("Evicted", "low on memory", "bert-1-a", created=1)
    reasons = [
        ready_state(status_for(snapshot(model_key(), evicted, next_, child=deployment()), model_spec()))[1]
        for next_ in (pod("bert-1-b", created=2), fetching("bert-1-b", created=2), serving("bert-1-b", created=2))
    ]
    assert reasons == ["Evicted", "Fetching", "Serving"]


def test_conditions_are_those_of_metav1():
    status = status_for(snapshot(model_key(), serving(), child=deployment(), generation=7), model_spec())

    assert status["conditions"][0] == {
        "type": "Ready",
        "status": "True",
        "reason": "Serving",
        "message": "1/1 replicas serving version 1",
        "lastTransitionTime": NOW,
    }
