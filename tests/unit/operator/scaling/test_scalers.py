"""Scalers that exclude each other."""

from typing import Any

import pytest

from halimede_operator.core.children.autoscaler import scaler
from halimede_operator.core.scaling.scalers import rival_of, without_second
from halimede_operator.core.snapshot import Snapshot
from halimede_operator.core.spec.types import Autoscaling, Provider
from support.operator_specs import UID, model_key

SCALING = Autoscaling(max_replicas=4)


def made(provider: Provider = Provider.HPA) -> Any:
    keda = {"provider": provider, "prometheus_address": "http://prometheus:9090"}
    found = scaler(model_key(), UID, Autoscaling(max_replicas=4, **keda))  # type: ignore[arg-type]
    assert found is not None
    return found


def hpa(kind: str, target: str, name: str = "theirs") -> Any:
    return {"metadata": {"name": name}, "spec": {"scaleTargetRef": {"kind": kind, "name": target}}}


@pytest.mark.parametrize("provider", [Provider.HPA, Provider.KEDA])
def test_rival_scales_the_deployment_or_its_owner(provider):
    theirs = [hpa("Deployment", "bert"), hpa("InferenceModel", "bert")]
    for each in theirs:
        assert rival_of(made(provider), [hpa("Deployment", "other"), each]) == each
    assert rival_of(made(provider), [hpa("Deployment", "other"), hpa("StatefulSet", "bert")]) is None
    assert rival_of(made(provider), [hpa("Deployment", "bert", name="bert")]) is None


def test_external_has_no_scaler():
    assert scaler(model_key(), UID, Autoscaling(max_replicas=4, provider=Provider.EXTERNAL)) is None


def snapshot(*kinds: str, keda_hpa: Any = None) -> Snapshot:
    children = tuple({"kind": kind, "metadata": {"name": "bert"}} for kind in kinds)
    return Snapshot(model_key(), {}, {}, children, (), (), {}, keda_hpa=keda_hpa)


@pytest.mark.parametrize(
    ("provider", "existing", "keda_hpa", "is_kept"),
    [
        (Provider.HPA, (), None, True),
        (Provider.HPA, ("HorizontalPodAutoscaler",), None, True),
        (Provider.HPA, ("ScaledObject",), None, False),
        (Provider.HPA, (), {"kind": "HorizontalPodAutoscaler"}, False),
        (Provider.KEDA, ("HorizontalPodAutoscaler",), None, False),
        (Provider.KEDA, ("ScaledObject",), {"kind": "HorizontalPodAutoscaler"}, True),
    ],
)
def test_a_scaler_waits_for_the_one_of_the_other_kind(provider, existing, keda_hpa, is_kept):
    other = {"kind": "Deployment"}
    wanted = (other, made(provider))
    assert without_second(wanted, snapshot(*existing, keda_hpa=keda_hpa)) == (wanted if is_kept else (other,))
