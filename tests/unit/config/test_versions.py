import pytest

from halimede.core.config.model_config import AllVersions, LatestVersions, ModelVersionPolicy, SpecificVersions
from halimede.core.config.versions import select_versions
from halimede.core.types import ErrorCode, InferenceError
from support.refusals import error_of


def latest(count: int) -> ModelVersionPolicy:
    return ModelVersionPolicy(latest=LatestVersions(count))


def specific(*versions: int) -> ModelVersionPolicy:
    return ModelVersionPolicy(specific=SpecificVersions(versions))


@pytest.mark.parametrize(
    ("policy", "selected"),
    [
        (None, (10,)),
        (ModelVersionPolicy(), (10,)),
        (latest(1), (10,)),
        (latest(2), (9, 10)),
        (latest(99), (2, 9, 10)),
        (ModelVersionPolicy(all=AllVersions()), (2, 9, 10)),
        (specific(9), (9,)),
        (specific(10, 2, 10), (2, 10)),
        (specific(2, 77), (2,)),
    ],
)
def test_a_policy_picks_versions_by_number(policy: ModelVersionPolicy | None, selected: tuple[int, ...]):
    assert select_versions(policy, [9, 10, 2], "m") == selected


@pytest.mark.parametrize(
    ("policy", "available"), [(None, []), (specific(3), [1, 2]), (latest(0), [1]), (specific(), [1])]
)
def test_a_model_without_a_version_to_serve_is_an_error(policy: ModelVersionPolicy | None, available: list[int]):
    assert error_of(select_versions, policy, available, "m") == InferenceError(
        ErrorCode.INVALID_ARG, "at least one version must be available under the version policy of model 'm'"
    )
