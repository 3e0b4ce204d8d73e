"""Healthy models that start together on a busy node are reported as started, and as nothing else."""

import pytest

from cluster.installed import Tenant
from cluster.models import apply, model, ready
from cluster.spaces import eventually

MODELS = 30
START_LIMIT_S = 500.0


@pytest.mark.large
@pytest.mark.timeout(600, func_only=True)
def test_thirty_healthy_starts_have_no_warning_of_the_operator(tenant: Tenant, scaled: str) -> None:
    small = {"requests": {"cpu": "10m", "memory": "32Mi"}}
    apply(tenant, *(model(f"m{number}", scaled, resources=small) for number in range(MODELS)))

    def all_ready() -> bool:
        return [each.get("status") for each in ready(tenant).values()] == ["True"] * MODELS

    eventually(all_ready, f"{MODELS} models", START_LIMIT_S)
    events = tenant.get("events")["items"]
    ours = [each for each in events if each["source"].get("component") == "halimede.dev/operator"]
    assert [each["message"] for each in ours if each["type"] != "Normal"] == []
    served = {each["involvedObject"]["name"] for each in ours if each["reason"] == "Serving"}
    assert served == {f"m{number}" for number in range(MODELS)}
