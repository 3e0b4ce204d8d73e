"""The operator's process against a real API server, with faults of the API server and of the operator itself.

It runs on this machine, as a ServiceAccount with the rights that the chart gives to an operator of one namespace. What
takes long is `load`: tests/shell/operator shows the same against an API server that is played.
"""

import json
import signal
import time
from collections import Counter

import pytest

from cluster.api import Refused
from cluster.faults import Faults
from cluster.faulty_api import Rule
from cluster.operators import LEASE, Operator, Site
from cluster.spaces import eventually
from support.custom_resources import CRDS

WRITES = "POST|PUT|PATCH|DELETE"


def test_the_charts_rights_suffice_and_at_rest_nothing_is_written(site: Site) -> None:
    """At rest, and when it is started again."""
    operator = site.start()
    for name in ("a", "b"):
        site.model(name, networkPolicy={"enabled": True}, replicas=2)
    eventually(lambda: site.settled("a", "b"), "the models' status", check=operator.check)
    children = site.children()
    assert Counter(name.partition(" ")[0] for name in children) == {
        "ConfigMap": 2, "ServiceAccount": 2, "Service": 4, "Deployment": 2, "PodDisruptionBudget": 2, "NetworkPolicy": 2
    }  # fmt: skip
    _at_rest(site)
    operator.end()

    site.start().ready()
    _at_rest(site)
    assert site.refused() == []


@pytest.mark.load
@pytest.mark.timeout(900, func_only=True)
def test_the_next_operator_completes_the_writes_of_a_killed_one(site: Site, faults: Faults) -> None:
    """O-20. Killed when the k-th write was done and before its answer came; another one goes on."""
    paths = rf"/namespaces/{site.namespace}/(?!leases)"
    lease = f"/apis/coordination.k8s.io/v1/namespaces/{site.namespace}/leases/{LEASE}"
    operator = site.start(faulty=True).ready()

    def make_changes(k: int | None) -> bool:
        """A model is made, changed and settles, while the operator is killed at write `k`; whether it came to that."""
        nonlocal operator
        before = site.writes().total()
        if k is not None:
            lost, stuck = Rule(WRITES, paths, times=1, lose=True), Rule(WRITES, paths, delay_s=1000)
            faults.set_api("pass", Rule(WRITES, paths, times=k), lost, stuck)
        was_killed = False

        def is_time() -> bool:
            return k is not None and not was_killed and site.writes().total() > before + k

        for replicas in (1, 2):
            site.model("digits", networkPolicy={"enabled": True}, replicas=replicas)
            eventually(lambda: is_time() or site.settled("digits"), f"write {k}, or the status", check=operator.check)
            if is_time():
                operator.kill()
                was_killed = True
                faults.set_api()
                # Else the next one would wait until it ends.
                site.own.api.send("DELETE", lease)
                operator = site.start(faulty=True).ready()
                eventually(lambda: site.settled("digits"), f"the status after write {k}", check=operator.check)
        return was_killed

    make_changes(None)
    whole = site.children()
    k, more = 0, True
    while more:
        site.own.api.send("DELETE", f"{site.models}/digits")
        eventually(lambda: not site.children(), "the children to go")
        more = make_changes(k)
        assert site.children() == whole, f"killed at write {k}"
        k += 1
    assert k > len(whole), "at each of the children's writes, and at some of the status"


def test_of_two_operators_the_frozen_one_writes_nothing_and_ends(site: Site) -> None:
    """O-30."""
    first = site.start("operator").ready()
    second = site.start("second")
    site.model("digits")
    eventually(lambda: site.settled("digits"), "the status", check=first.check)
    eventually(lambda: second.probe("readyz") == 200, "the second to stand by", check=second.check)
    assert (second.leads(), site.writes("second")) == (False, {})

    first.process.send_signal(signal.SIGSTOP)
    site.model("digits", replicas=3)
    begun = time.monotonic()
    eventually(second.leads, "the second to take over", 40)
    assert time.monotonic() - begun > 5, "not before the first one's lease ended"
    eventually(lambda: site.settled("digits"), "the status", check=second.check)
    by_first = site.writes("operator")
    site.model("digits", replicas=4)
    first.process.send_signal(signal.SIGCONT)
    assert first.process.wait(30) == 3
    eventually(lambda: site.settled("digits"), "the status", check=second.check)
    assert site.writes("operator") == by_first
    assert second.end() == 0
    assert site.get("lease", LEASE)["spec"]["holderIdentity"] in (None, "")


OUTAGES = {
    "refused": ("refuse", ()),
    "hanging": ("hang", ()),
    "unavailable": ("pass", (Rule(status=503),)),
    "forbidden": ("pass", (Rule(status=403),)),
    "too many": ("pass", (Rule(status=429),)),
}


@pytest.mark.large
def test_missing_and_recreated_crds_are_waited_for(site: Site) -> None:
    """O-12."""
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    names = [crd["metadata"]["name"] for crd in CRDS.values()]
    whole = [site.own.api.get(f"{path}/{name}") for name in names]

    def there() -> list[str]:
        return [crd["metadata"]["name"] for crd in site.own.api.get(path)["items"]]

    def remove() -> None:
        for name in names:
            site.own.api.send("DELETE", f"{path}/{name}")
        eventually(lambda: not {*names} & {*there()}, "the kinds to go")

    def put_back() -> None:
        # As helm knows them, where it was helm that made them.
        for crd in whole:
            kept = {key: crd["metadata"][key] for key in ("name", "labels", "annotations") if key in crd["metadata"]}
            head = {key: crd[key] for key in ("apiVersion", "kind", "spec")}
            site.own.api.create(path, {**head, "metadata": kept})

    remove()
    try:
        operator = site.start()
        eventually(lambda: "CRDs" in operator.log.read_text(), "it to say what is missing", check=operator.check)
        assert (operator.probe("healthz"), operator.probe("readyz")) == (200, 503)
        put_back()
        operator.ready()
        site.model("digits")
        eventually(lambda: site.settled("digits"), "the status", check=operator.check)

        before = operator.log.read_text().count("CRDs")
        remove()
        eventually(lambda: operator.log.read_text().count("CRDs") > before, "it to know", 60, operator.check)
        assert operator.probe("healthz") == 200
    finally:
        put_back()
    eventually(lambda: _takes(site, "digits"), "the API server to take models again")
    eventually(lambda: site.settled("digits"), "the status", check=operator.check)
    assert operator.end() == 0


def _takes(site: Site, name: str) -> bool:
    try:
        site.model(name)
    except (Refused, OSError):
        return False
    return True


@pytest.mark.load
@pytest.mark.parametrize(("mode", "rules"), OUTAGES.values(), ids=OUTAGES.keys())
def test_the_operator_survives_an_api_server_outage(
    site: Site, faults: Faults, mode: str, rules: tuple[Rule, ...]
) -> None:
    """O-01, O-02, O-07, O-09, O-11. 25 s, longer than a lease."""
    _outage(site, faults, mode, rules, 25)


@pytest.mark.load
@pytest.mark.timeout(600, func_only=True)
def test_the_operator_survives_an_outage_of_five_minutes(site: Site, faults: Faults) -> None:
    """O-02."""
    _outage(site, faults, "pass", (Rule(status=503),), 300)


@pytest.mark.load
@pytest.mark.timeout(600, func_only=True)
def test_the_operator_survives_a_frozen_api_server_of_five_minutes(site: Site, faults: Faults) -> None:
    """O-02. Its connections stay open and say nothing."""
    operator = site.start().ready()
    site.model("before")
    eventually(lambda: site.settled("before"), "the status", check=operator.check)
    faults.freeze_program("kube-apiserver")
    _wait_alive(operator, 300)
    assert not operator.leads()
    faults.resume()
    _goes_on(site, operator)


@pytest.mark.load
def test_the_operator_survives_a_restart_of_etcd(site: Site, faults: Faults) -> None:
    operator = site.start().ready()
    site.model("before")
    eventually(lambda: site.settled("before"), "the status", check=operator.check)
    faults.restart_program("etcd")
    _goes_on(site, operator)
    assert operator.leads()


def _goes_on(site: Site, operator: Operator) -> None:
    """Soon after all is well again, a new model is known and an old one is changed."""
    back = time.monotonic()
    eventually(lambda: _takes(site, "after"), "the API server to take models again")
    site.model("before", replicas=3)
    eventually(lambda: site.settled("before", "after"), "the status", 60, operator.check)
    print(f"settled {time.monotonic() - back:.1f} s after all was well again")


def _wait_alive(operator: Operator, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        operator.check()
        assert operator.probe("healthz") == 200
        time.sleep(1)


def _outage(site: Site, faults: Faults, mode: str, rules: tuple[Rule, ...], seconds: float) -> None:
    operator = site.start(faulty=True).ready()
    site.model("before")
    eventually(lambda: site.settled("before"), "the status", check=operator.check)
    faults.set_api(mode, *rules)
    site.model("meanwhile")
    site.kubectl("delete", "inferencemodel", "before")
    _wait_alive(operator, seconds)
    assert not operator.leads()
    faults.set_api()
    back = time.monotonic()
    eventually(lambda: site.settled("meanwhile"), "the new model", check=operator.check)
    print(f"settled {time.monotonic() - back:.1f} s after the API server was back")
    site.model("after")
    eventually(lambda: site.settled("after"), "the watches", check=operator.check)
    eventually(lambda: all(" before" not in name for name in site.children()), "what was deleted to go")


@pytest.mark.load
def test_slow_answers_create_nothing_twice(site: Site, faults: Faults) -> None:
    """O-08."""
    operator = site.start(faulty=True).ready()
    faults.set_api("pass", Rule("PATCH", delay_s=3.0))
    site.model("digits")
    eventually(lambda: site.settled("digits"), "the status", check=operator.check)
    assert site.writes() == {
        "patch configmaps 201": 1, "patch serviceaccounts 201": 1, "patch services 201": 2, "patch deployments 201": 1,
        "patch inferencemodels 200": site.writes()["patch inferencemodels 200"],
    }  # fmt: skip


@pytest.mark.large
def test_deletion_leaves_nothing_and_recreates_nothing(site: Site) -> None:
    """O-40, O-41: with an operator, and without one."""
    operator = site.start().ready()
    for name in ("first", "second"):
        site.model(name)
    eventually(lambda: site.settled("first", "second"), "the status", check=operator.check)
    site.kubectl("delete", "inferencemodel", "first", "--cascade=foreground", "--timeout=60s")
    eventually(lambda: not _of(site, "first"), "nothing to be left", 60)
    written = site.writes()
    time.sleep(3)  # nothing comes again
    assert (_of(site, "first"), site.writes()) == (set(), written)

    operator.end()
    site.kubectl("delete", "inferencemodel", "second", "--timeout=60s")
    eventually(lambda: not site.children(), "nothing to be left", 60)


def _of(site: Site, model: str) -> set[str]:
    return {name for name, child in site.children().items() if child["labels"]["halimede.dev/model"] == model}


@pytest.mark.load
@pytest.mark.timeout(900, func_only=True)
def test_two_hundred_models_at_rest_cost_no_write(site: Site) -> None:
    operator = site.start().ready()
    values = [
        {
            "apiVersion": "halimede.dev/v1alpha1",
            "kind": "InferenceModel",
            "metadata": {"name": f"m{n}", "namespace": site.namespace},
            "spec": {"model": {"uri": "s3://models/digits"}, "scheduling": {"nodeSelector": {"nowhere": "yes"}}},
        }
        for n in range(200)
    ]
    site.kubectl(
        "apply", "--server-side", "-f", "-", given=json.dumps({"apiVersion": "v1", "kind": "List", "items": values})
    )
    names = [value["metadata"]["name"] for value in values]
    eventually(lambda: site.settled(*names), "200 models", 300, operator.check)
    _at_rest(site, 60)


def _at_rest(site: Site, seconds: float = 3) -> None:
    """Nothing but the lease is written for so long, from when nothing was for a while."""

    def quiet() -> bool:
        before = site.writes()
        time.sleep(3)
        return site.writes() == before

    eventually(quiet, "the operator to come to rest", 120)
    written = site.writes()
    time.sleep(seconds)
    assert site.writes() == written
