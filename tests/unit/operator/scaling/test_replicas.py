"""Who sets the number of replicas, and what happens between two states of a spec."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halimede_operator.core.scaling.replicas import IS_OURS, Replicas, are_ours, held, present_of, replicas_of
from halimede_operator.core.spec.types import Autoscaling, Provider, Workload

SCALING = Autoscaling(max_replicas=8, min_replicas=2)
PLAIN = Workload(replicas=3)
SCALED = Workload(replicas=3, autoscaling=SCALING)


def deployment(replicas: int, *, ours: bool) -> dict[str, Any]:
    metadata = {"name": "bert", "namespace": "prod", "uid": "u", "resourceVersion": "7"}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata,
        "spec": {"replicas": replicas},
        IS_OURS: ours,
    }


@pytest.mark.parametrize(
    ("workload", "existing", "scaler_exists", "decided"),
    [
        (PLAIN, None, False, Replicas(3, 3)),
        (PLAIN, deployment(5, ours=False), False, Replicas(3, 3)),
        (PLAIN, deployment(5, ours=False), True, Replicas(5, None)),
        (PLAIN, deployment(5, ours=True), True, Replicas(5, None, 5)),
        (replace(SCALED, suspend=True), deployment(5, ours=False), True, Replicas(5, None)),
        (replace(SCALED, suspend=True), deployment(5, ours=False), False, Replicas(0, 0)),
        (SCALED, None, False, Replicas(2, 2)),
        (replace(SCALED, autoscaling=replace(SCALING, min_replicas=1)), None, False, Replicas(1, None)),
        (replace(SCALED, autoscaling=replace(SCALING, min_replicas=0)), None, False, Replicas(1, None)),
        (SCALED, deployment(5, ours=True), False, Replicas(5, None, 5)),
        (SCALED, deployment(0, ours=True), False, Replicas(2, None, 2)),
        (SCALED, deployment(0, ours=False), True, Replicas(0, None)),
        (SCALED, deployment(7, ours=False), True, Replicas(7, None)),
        (replace(SCALED, autoscaling=replace(SCALING, provider=Provider.EXTERNAL)), deployment(4, ours=False), False,
         Replicas(4, None)),
    ],
)  # fmt: skip
def test_table(workload, existing, scaler_exists, decided):
    assert replicas_of(workload, existing, scaler_exists) == decided


def test_ours_is_what_our_field_manager_applied():
    spec = {"f:spec": {"f:replicas": {}}}
    ours = {"manager": "halimede-operator", "operation": "Apply", "fieldsV1": spec}
    assert are_ours([ours])
    assert not are_ours([{**ours, "manager": "halimede-operator-replicas"}])
    assert not are_ours([{**ours, "fieldsV1": {"f:spec": {"f:template": {}}}}])
    assert not are_ours([{**ours, "operation": "Update"}])
    assert not are_ours([])


def test_holder_applies_the_number_alone_to_the_version_that_was_read():
    existing = deployment(5, ours=True)
    assert held(existing, 5) == {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": existing["metadata"],
        "spec": {"replicas": 5},
    }


class Cluster:
    """A Deployment with the owners of its `replicas` as server-side apply keeps them, and a scaler."""

    def __init__(self) -> None:
        self.existing: dict[str, Any] | None = None
        self.owners: set[str] = set()
        self.scaler = False
        self.history: list[int] = []

    def set(self, number: int, *owners: str) -> None:
        self.existing = deployment(number, ours="operator" in owners)
        self.owners = set(owners)
        self.history.append(number)

    def apply(self, who: str, number: int | None) -> None:
        """Server-side apply with force."""
        if self.existing is None:
            self.set(1 if number is None else number, *([who] if number is not None else []))
        elif number is None:
            was_last = self.owners == {who}
            left = self.owners - {who}
            self.set(1 if was_last else present_of(self.existing), *left)
        else:
            shared = self.owners if present_of(self.existing) == number else set()
            self.set(number, *shared, who)

    def scale(self, number: int) -> None:
        """By the HPA, or by hand."""
        if self.existing is not None:
            self.set(number, "another")

    def reconcile(self, workload: Workload) -> None:
        wants_scaler = workload.autoscaling is not None and not workload.suspend
        decided = replicas_of(workload, self.existing, self.scaler)
        if self.scaler and not wants_scaler:
            self.scaler = False
        if decided.held is not None:
            self.apply("holder", decided.held)
        self.apply("operator", decided.applied)
        self.scaler = self.scaler or wants_scaler


SPECS = st.sampled_from(
    [PLAIN, SCALED, replace(SCALED, suspend=True), Workload(replicas=5), replace(SCALED, replicas=9)]
)


@given(st.lists(st.tuples(SPECS, st.integers(1, 8) | st.none()), min_size=1, max_size=12))
def test_number_changes_only_by_the_spec_the_scaler_or_a_start(steps):
    cluster = Cluster()
    for workload, by_scaler in steps:
        before = None if cluster.existing is None else present_of(cluster.existing)
        is_scaled = workload.autoscaling is not None and not workload.suspend
        cluster.history.clear()
        for _ in range(3):
            cluster.reconcile(workload)
        assert cluster.existing is not None
        now = present_of(cluster.existing)
        assert cluster.scaler == is_scaled
        allowed = {before, now} - {None}
        assert set(cluster.history) <= allowed
        if not is_scaled:
            assert now == (0 if workload.suspend else workload.replicas)
        elif before:
            assert now == before
        else:
            assert now == 2
        if is_scaled and by_scaler is not None:
            cluster.scale(by_scaler)
            for _ in range(2):
                cluster.reconcile(workload)
            assert present_of(cluster.existing) == by_scaler
