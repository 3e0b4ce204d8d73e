"""From the chart to responses: models that a user applies are served by real pods on real nodes."""

from pathlib import Path

import pytest

from cluster.gpus import Gpus, Layout
from cluster.installed import Platform, Tenant
from cluster.spaces import eventually
from support.models import add_scaled, write_config

SECONDS_TO_TELL = 10.0
"""Within which an object says why it does not serve."""
START_LIMIT_S = 120.0

DEVICE = """import os
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        print("runs on", os.environ["CUDA_VISIBLE_DEVICES"])
        while {waits_while}:
            time.sleep(0.1)

    def execute(self, requests):
        seen = np.array([[os.environ.get("CUDA_VISIBLE_DEVICES", "none").encode()]], object)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("DEVICE", seen)]) for _ in requests]
"""
DEVICE_CONFIG = """
backend: "python"
input [ { name: "ANY" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "DEVICE" data_type: TYPE_STRING dims: [ 1, 1 ] } ]
instance_group [ { kind: KIND_GPU } ]
"""


def model(name: str, uri: str, *lines: str) -> str:
    return "\n".join(
        (
            "apiVersion: halimede.dev/v1alpha1",
            "kind: InferenceModel",
            f"metadata: {{name: {name}}}",
            "spec:",
            f"  model: {{uri: {uri!r}}}",
            *(f"  {line}" for line in lines),
        )
    )


@pytest.fixture
def scaled(platform: Platform, tmp_path: Path) -> str:
    """The URI of a model that doubles four numbers."""
    add_scaled(tmp_path, "twice", 2)
    return platform.store.put("twice", tmp_path / "twice")


def test_a_model_has_the_gpu_slice_that_it_requested(
    tenant: Tenant, platform: Platform, gpus: Gpus, tmp_path: Path
) -> None:
    gpus.install("node-1", Layout([["3g.40gb"], ["1g.10gb", "1g.10gb"]]))
    (tmp_path / "device" / "1").mkdir(parents=True)
    waits_while = '" 3000 NVIDIA" not in open(os.environ["PLAYED_DEVICES"]).read()'
    (tmp_path / "device" / "1" / "model.py").write_text(DEVICE.format(waits_while=waits_while))
    write_config(tmp_path / "device", DEVICE_CONFIG)
    uri = platform.store.put("device", tmp_path / "device")
    tenant.apply(model("device", uri, "accelerator: {type: MIG, mig: {profile: 3g.40gb}}"))
    (slice_,) = gpus.devices("node-1", "nvidia.com/mig-3g.40gb")

    def is_loading() -> bool:
        # Before that there is no log.
        started = [
            pod["metadata"]["name"]
            for pod in tenant.get("pods")["items"]
            if any("running" in status["state"] for status in pod["status"].get("containerStatuses", ()))
        ]
        pods = f"/api/v1/namespaces/{tenant.namespace}/pods"
        return any(
            "runs on" in tenant.cluster.api.send("GET", f"{pods}/{name}/log?container=server") for name in started
        )

    eventually(is_loading, "the model to be loaded", START_LIMIT_S)
    gpus.use("node-1", {slice_: 3000})
    tenant.wait_ready("im/device", START_LIMIT_S)
    assert tenant.infer("device", {"ANY": ("INT32", [1], [0])}) == {"DEVICE": [slice_]}
    assert tenant.get("im/device")["status"]["effective"]["resourceName"] == "nvidia.com/mig-3g.40gb"
    eventually(lambda: "memory" in tenant.get("im/device")["status"], "the devices to be reported", SECONDS_TO_TELL)
    status = tenant.get("im/device")["status"]
    (pod,) = tenant.names("pods")
    assert status["placements"] == [f"{pod.removeprefix('pod/')} on node-1: 3g.40gb {slice_}"]
    assert (status["memory"]["devicePeak"], status["memory"]["deviceTotal"]) == ("3000Mi", "40448Mi")
    assert status["memory"]["hostPeak"].endswith("Mi")
    (placed,) = (each["message"] for each in status["conditions"] if each["type"] == "Placed")
    assert placed.endswith("spec.accelerator.mig.minMemory 3072Mi suits the model better")
    tenant.check_is_described_shortly("im/device")


@pytest.mark.large
def test_a_pod_with_two_slices_runs_instances_on_both(
    tenant: Tenant, platform: Platform, gpus: Gpus, tmp_path: Path
) -> None:
    gpus.install("node-1", Layout([["1g.10gb", "1g.10gb"]]))
    (tmp_path / "both" / "1").mkdir(parents=True)
    (tmp_path / "both" / "1" / "model.py").write_text(DEVICE.format(waits_while=False))
    write_config(tmp_path / "both", DEVICE_CONFIG)
    uri = platform.store.put("both", tmp_path / "both")
    accelerator = "accelerator: {type: MIG, count: 2, processPerDevice: true, mig: {profile: 1g.10gb}}"
    tenant.apply(model("both", uri, accelerator))
    tenant.wait_ready("im/both", START_LIMIT_S)
    slices = set(gpus.devices("node-1", "nvidia.com/mig-1g.10gb"))
    log = tenant.kubectl("logs", "-l=halimede.dev/model=both", "--tail=-1")
    assert {device for device in slices if f"runs on {device}" in log} == slices

    def devices() -> str:
        (placement,) = tenant.get("im/both")["status"]["placements"]
        return str(placement).partition(": ")[2]

    eventually(devices, "the devices to be reported", SECONDS_TO_TELL)
    assert set(devices().split(", ")) == {f"1g.10gb {device}" for device in slices}
    assert tenant.infer("both", {"ANY": ("INT32", [1], [0])})["DEVICE"][0] in slices


def test_an_ensemble_of_three_models_serves(tenant: Tenant, platform: Platform, tmp_path: Path) -> None:
    for name, factor in (("two", 2), ("three", 3), ("five", 5)):
        add_scaled(tmp_path, name, factor)
        # Models that are steps alone have no pods of their own.
        tenant.apply(model(name, platform.store.put(f"steps/{name}", tmp_path / name), "replicas: 0"))
    tenant.apply(
        """
apiVersion: halimede.dev/v1alpha1
kind: ModelEnsemble
metadata: {name: thirty}
spec:
  maxBatchSize: 4
  inputs: [{name: IN, dataType: FP32, shape: [4]}]
  outputs: [{name: OUT, dataType: FP32, shape: [4], from: third.out}]
  steps:
  - {name: first, modelRef: {name: two}, inputs: {IN: request.IN}, outputs: {OUT: out}}
  - {name: second, modelRef: {name: three}, inputs: {IN: first.out}, outputs: {OUT: out}}
  - {name: third, modelRef: {name: five}, inputs: {IN: second.out}, outputs: {OUT: out}}
"""
    )
    tenant.wait_ready("mens/thirty", START_LIMIT_S)
    assert tenant.infer("thirty", {"IN": ("FP32", [1, 4], [1, 2, 3, 4])}) == {"OUT": [30, 60, 90, 120]}
    assert tenant.get("mens/thirty")["status"]["readySteps"] == "3/3"
    tenant.check_is_described_shortly("mens/thirty")

    # A member that changes is brought into the pod.
    add_scaled(tmp_path, "seven", 7)
    tenant.apply(model("five", platform.store.put("steps/seven", tmp_path / "seven"), "replicas: 0"))
    eventually(
        lambda: tenant.infer("thirty", {"IN": ("FP32", [1, 4], [1, 0, 0, 0])})["OUT"][0] == 42,
        "the new member to answer",
        START_LIMIT_S,
    )


def test_a_uri_without_a_model_is_reported(tenant: Tenant) -> None:
    tenant.apply(model("nothing", "s3://models/nowhere"))
    message = tenant.wait_for_reason("im/nothing", "ModelFetchFailed", START_LIMIT_S)
    assert "s3://models/nowhere" in message


@pytest.mark.large
def test_an_invalid_configuration_is_reported(tenant: Tenant, platform: Platform, tmp_path: Path) -> None:
    add_scaled(tmp_path, "odd", 2)
    write_config(tmp_path / "odd", "max_batch_size: many\n")
    tenant.apply(model("odd", platform.store.put("odd", tmp_path / "odd")))
    message = tenant.wait_for_reason("im/odd", "InvalidModel", START_LIMIT_S)
    assert "max_batch_size" in message


@pytest.mark.large
def test_a_model_that_cannot_be_loaded_is_reported(tenant: Tenant, platform: Platform, tmp_path: Path) -> None:
    (tmp_path / "broken" / "1").mkdir(parents=True)
    (tmp_path / "broken" / "1" / "model.onnx").write_bytes(b"this is no model")
    tenant.apply(model("broken", platform.store.put("broken", tmp_path / "broken")))
    message = tenant.wait_for_reason("im/broken", "ModelLoadFailed", START_LIMIT_S)
    assert "broken" in message


@pytest.mark.large
def test_a_device_that_no_node_has_is_reported(tenant: Tenant, gpus: Gpus, scaled: str) -> None:
    gpus.install("node-1", Layout([["1g.10gb"]]))
    tenant.apply(model("hungry", scaled, "accelerator: {type: MIG, mig: {profile: 7g.80gb}}"))
    # The operator may learn of the model before it learns of the node's devices.
    message = tenant.wait_for_reason("im/hungry", "InsufficientDevices", SECONDS_TO_TELL, "1g.10gb")
    assert "need 1x 7g.80gb" in message


def test_a_user_makes_scales_edits_and_deletes_a_model(tenant: Tenant, scaled: str) -> None:
    tenant.apply(
        f"""
apiVersion: halimede.dev/v1alpha1
kind: InferenceModel
metadata: {{name: twice}}
spec: {{model: {{uri: "{scaled}"}}}}
"""
    )
    tenant.wait_ready("im/twice", START_LIMIT_S)
    assert tenant.infer("twice", {"IN": ("FP32", [1, 4], [1, 2, 3, 4])}) == {"OUT": [2, 4, 6, 8]}
    line = tenant.kubectl("get", "im", "twice", "--no-headers").split()
    assert line[:5] == ["twice", "True", "Serving", "1", "1"]
    tenant.kubectl("scale", "im/twice", "--replicas=2")
    eventually(lambda: tenant.get("im/twice")["status"].get("readyReplicas") == 2, "two replicas", START_LIMIT_S)
    tenant.check_is_described_shortly("im/twice")

    # A child that is changed by hand is put right; what is foreign stays.
    tenant.kubectl("annotate", "deployment/twice", "example.com/mine=yes")
    image = tenant.get("deployment/twice")["spec"]["template"]["spec"]["containers"][0]["image"]
    tenant.kubectl("set", "image", "deployment/twice", "server=localhost/another:1")
    tenant.kubectl("delete", "service/twice")

    def is_whole() -> bool:
        found = tenant.get("deployment/twice")["spec"]["template"]["spec"]["containers"][0]["image"]
        return found == image and "service/twice" in tenant.names("services")

    eventually(is_whole, "the children to be put right")
    assert tenant.get("deployment/twice")["metadata"]["annotations"]["example.com/mine"] == "yes"

    tenant.kubectl("delete", "im/twice", "--timeout=60s")
    kinds = "deployments,services,configmaps,serviceaccounts,poddisruptionbudgets,replicasets,pods"
    left = {"configmap/kube-root-ca.crt", "serviceaccount/default"}
    eventually(lambda: tenant.names(kinds) == left, "nothing to be left", START_LIMIT_S)
