"""Random histories of an object with events that come late, out of order, twice or never: only the last spec counts.

A history is any sequence of steps of the user, of Kubernetes' controllers, of watches and of the operator.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from halimede_operator.cluster.kinds import WATCHED
from halimede_operator.core.spec.types import Key
from halimede_operator.queue import Done
from support.operator_harness import CHILDREN, DIGITS, Harness, second_operator, with_harness

Object = dict[str, Any]

PROFILE = settings(
    max_examples=30,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
BY_PLURAL = {resource.plural: resource for resource in WATCHED}


def spec(model: str, replicas: int, policy: bool = False) -> Object:
    return {"model": {"uri": f"s3://models/{model}"}, "replicas": replicas, "networkPolicy": {"enabled": policy}}


class World:
    """An operator's harness, a user, and the relevant parts of Kubernetes' controllers."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.api = harness.api
        self.is_due = True
        self._told = 0

    def _wake(self, key: Key) -> None:
        self.is_due = self.is_due or key == DIGITS

    def edit(self, value: Object) -> None:
        self.api.put("inferencemodels", "prod", "digits", spec=value)

    def delete(self) -> None:
        if ("inferencemodels", "prod", "digits") in self.api.objects:
            self.api.remove("inferencemodels", "prod", "digits")

    def collect(self) -> None:
        """Garbage collection: delete objects whose owner does not exist."""
        while gone := [where for where, value in self.api.objects.items() if self._owner(value) not in self._uids()]:
            for where in gone:
                self.api.remove(*where)

    def roll_out(self) -> None:
        """Create a ReplicaSet for the Deployment's template; older ones stay."""
        deployment = self.api.objects.get(("deployments", "prod", "digits"))
        if deployment is None:
            return
        revision = deployment["metadata"]["annotations"]["halimede.dev/template-hash"]
        name, uid = f"digits-{revision}", deployment["metadata"]["uid"]
        if name not in self.api.named("replicasets"):
            owner = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "digits", "uid": uid, "controller": True}
            metadata = {"labels": deployment["metadata"]["labels"], "ownerReferences": [owner]}
            template = deployment["spec"]["template"]
            self.api.put("replicasets", "prod", name, spec={"template": template}, metadata=metadata)

    def deliver(self, order: Callable[[list[int]], list[int]] = list) -> None:
        """Deliver all events since the last time, in the given order, each as often as given."""
        since = self.api.history[self._told :]
        self._told = len(self.api.history)
        for i in order(list(range(len(since)))):
            _, plural, event, value = since[i]
            if plural not in BY_PLURAL:  # an Event, which the operator does not watch
                continue
            metadata = value["metadata"]
            if event == "DELETED":
                news = self.harness.cache.delete(metadata["uid"], int(metadata["resourceVersion"]))
            else:
                news = self.harness.cache.put(BY_PLURAL[plural], value)
            for key in news:
                self._wake(key)
        self._is_known_as_it_is()

    async def reconcile(self) -> None:
        """Check that nothing is written for a deleted object, or for another object than the existing one."""
        model = self.api.objects.get(("inferencemodels", "prod", "digits"))
        before = self.api.version
        self.harness.now += 10
        outcome = await self.harness.reconcile(DIGITS)
        self.is_due = outcome != Done() and model is not None
        written = [value for version, plural, event, value in self.api.history if version > before and plural in CHILDREN and event != "DELETED"]  # fmt: skip
        assert {self._owner(value) for value in written} <= ({model["metadata"]["uid"]} if model else set())
        self._nothing_is_missing()

    async def settle(self) -> None:
        """Run the reconciles that watches or reconciles themselves ask for, without any resync."""
        for _ in range(20):
            self.roll_out()
            self.collect()
            # All twice, and the oldest last.
            self.deliver(lambda of: of + of[::-1])
            if not self.is_due:
                return
            await self.reconcile()
        raise AssertionError("it does not come to rest")

    def children(self) -> dict[tuple[str, str, str], Object]:
        return {where: value for where, value in self.api.objects.items() if where[0] not in ("inferencemodels", "events")}  # fmt: skip

    def is_made_of(self, value: Object) -> None:
        deployment = self.api.objects["deployments", "prod", "digits"]
        plan = next(each["configMap"]["name"] for each in deployment["spec"]["template"]["spec"]["volumes"] if "configMap" in each)  # fmt: skip
        assert deployment["spec"]["replicas"] == value["replicas"]
        assert value["model"]["uri"] in json.dumps(self.api.objects["configmaps", "prod", plan])
        assert ("digits" in self.api.named("networkpolicies")) == value["networkPolicy"]["enabled"]
        assert self.harness.digits()["status"]["observedGeneration"] == self.harness.digits()["metadata"]["generation"]

    def _nothing_is_missing(self) -> None:
        """Check that no ReplicaSet's pods wait for a deleted ConfigMap or ServiceAccount."""
        for (plural, _, _), value in self.api.objects.items():
            if plural == "replicasets" and self._owner(value) in self._uids():
                pod = value["spec"]["template"]["spec"]
                plans = {each["configMap"]["name"] for each in pod["volumes"] if "configMap" in each}
                assert plans <= self.api.named("configmaps")
                assert pod["serviceAccountName"] in self.api.named("serviceaccounts")

    def _is_known_as_it_is(self) -> None:
        for plural, namespace, name in {
            (plural, "prod", value["metadata"]["name"])
            for _, plural, _, value in self.api.history
            if plural in BY_PLURAL
        }:
            known = self.harness.cache.find(BY_PLURAL[plural].kind, namespace, name)
            there = self.api.objects.get((plural, namespace, name))
            assert (str(known.version) if known else None) == (there["metadata"]["resourceVersion"] if there else None)

    def _uids(self) -> set[str | None]:
        return {None, *(value["metadata"]["uid"] for value in self.api.objects.values())}

    def _owner(self, value: Object) -> str | None:
        owners = value["metadata"].get("ownerReferences") or ()
        return next((owner["uid"] for owner in owners), None)


SPECS = st.builds(spec, st.sampled_from("abc"), st.integers(1, 3), st.booleans())
ORDERS = st.builds(
    lambda seed: lambda of: seed.sample(of + of[: len(of) // 2], len(of) + len(of) // 2), st.randoms(use_true_random=False)
)  # fmt: skip
STEPS = st.one_of(
    st.tuples(st.just("edit"), SPECS),
    st.tuples(st.just("deliver"), ORDERS),
    st.tuples(st.sampled_from(["delete", "collect", "roll_out", "reconcile", "settle"])),
)
A3, A2 = spec("a", 3), spec("a", 2)


@PROFILE
@given(steps=st.lists(STEPS, max_size=14), last=st.none() | SPECS)
@example(steps=[("edit", A3), ("settle",), ("delete",), ("edit", A2), ("delete",)], last=A3)
@example(steps=[("edit", A3), ("settle",), ("edit", A2), ("edit", A3)], last=A3)
@example(steps=[("edit", A3), ("settle",), ("delete",)], last=None)
def test_the_end_state_depends_only_on_the_last_spec(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[Any, ...]], last: Object | None
):
    """O-22, O-23."""

    async def scenario(harness: Harness) -> None:
        world = World(harness)
        for name, *arguments in steps:
            if (running := getattr(world, name)(*arguments)) is not None:
                await running
        if last is None:
            world.delete()
        else:
            world.edit(last)
        await world.settle()
        if last is None:
            assert world.children() == {}
        else:
            world.is_made_of(last)
            written = harness.api.writes()
            world.is_due = True
            await world.settle()
            assert harness.api.writes() == written

    with_harness(scenario)(tmp_path_factory.mktemp("history"))


NOW = dict.fromkeys(BY_PLURAL, 100)
SHARES = st.fixed_dictionaries({plural: st.integers(0, 100) for plural in BY_PLURAL})


@PROFILE
@given(specs=st.lists(SPECS, min_size=1, max_size=4), shares=SHARES)
@example(specs=[A3, spec("b", 3)], shares={**NOW, "replicasets": 0})
@example(specs=[A2, A3], shares={**NOW, "inferencemodels": 30})
def test_old_lists_after_a_restart_delete_and_scale_nothing(
    tmp_path_factory: pytest.TempPathFactory, specs: list[Object], shares: dict[str, int]
):
    """O-21: each kind as it was at any time before, in percent of the history."""

    async def scenario(harness: Harness) -> None:
        world = World(harness)
        for each in specs:
            world.edit(each)
            await world.settle()
        whole = {where: value.get("spec") for where, value in world.children().items()}
        begin, now = 100, harness.api.version
        async with second_operator(harness) as other:
            other.relist({plural: begin + (now - begin) * share // 100 for plural, share in shares.items()})
            for _ in range(3):
                await other.reconcile(DIGITS)
                assert {where: value.get("spec") for where, value in world.children().items()} == whole
            other.relist()
            assert await other.reconcile(DIGITS) == Done()
        assert {where: value.get("spec") for where, value in world.children().items()} == whole

    with_harness(scenario)(tmp_path_factory.mktemp("stale"))
