"""What a person repairs is noticed soon, although the operator can watch none of it."""

from pathlib import Path

import pytest

from cluster.installed import S3_SECRET, Platform, Tenant
from cluster.models import START_LIMIT_S, TOKEN, apply, holding, model, ready
from cluster.spaces import eventually
from support.models import add_scaled

SECONDS_TO_RECOVER = 30.0


@pytest.mark.large
def test_completed_secrets_are_noticed_soon(platform: Platform, tenant: Tenant, scaled: str, tmp_path: Path) -> None:
    """Without the change of the pod, a kubelet brings a Secret into it after up to 90 s."""
    add_scaled(tmp_path, "private", 3)
    private = platform.store.put("completed", tmp_path / "private", is_public=False)
    credentials = {"secretRef": {"name": "keys"}}
    variable = {"name": "A", "valueFrom": {"secretKeyRef": {"name": "words", "key": "A"}}}
    cases = {
        "own": ({"model": {"uri": private, "credentials": credentials}}, "ModelFetchFailed"),
        "platform": ({"model": {"uri": private}}, "ModelFetchFailed"),
        "variable": ({"model": {"uri": scaled}, "env": [variable]}, "SecretMissing"),
    }
    apply(tenant, holding("Secret", "keys", stringData={"AWS_SECRET_ACCESS_KEY": TOKEN}))
    apply(tenant, *({**model(name, ""), "spec": spec} for name, (spec, _) in cases.items()))
    reasons = {name: reason for name, (_, reason) in cases.items()}
    eventually(
        lambda: {name: each.get("reason") for name, each in ready(tenant).items()} == reasons,
        "all to be reported",
        START_LIMIT_S,
    )

    keys = {"AWS_ACCESS_KEY_ID": "somebody", "AWS_SECRET_ACCESS_KEY": TOKEN}
    apply(
        tenant,
        holding("Secret", "keys", stringData=keys),
        holding("Secret", S3_SECRET, stringData=keys),
        holding("Secret", "words", stringData={"A": "B"}),
    )
    for name in cases:
        tenant.wait_ready(f"im/{name}", SECONDS_TO_RECOVER)
    # The pods are the first ones.
    assert len(tenant.names("pods")) == len(cases)
