import pytest

from halimede_operator.cluster.kinds import MODELS, PODS, WATCHED, Resource, resource_of


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/api/v1/pods", (PODS, None)),
        ("/api/v1/namespaces/prod/pods", (PODS, "prod")),
        ("/apis/halimede.dev/v1alpha1/inferencemodels", (MODELS, None)),
        ("/api/v1/namespaces", None),
        ("/apis/apps/v1", None),
        ("/apis/metrics.k8s.io/v1beta1/pods", None),
    ],
)
def test_what_a_request_is_for(path: str, found: tuple[Resource, str | None] | None):
    assert resource_of(path) == found


def test_paths_lead_back_to_their_kinds():
    for resource in WATCHED:
        assert resource_of(resource.path(None)) == (resource, None)
        assert resource_of(resource.path("prod")) == (resource, "prod")
    assert MODELS.path("prod", "digits", "status") == (
        "/apis/halimede.dev/v1alpha1/namespaces/prod/inferencemodels/digits/status"
    )
