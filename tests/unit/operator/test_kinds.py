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
def test_resource_of_reads_a_request_path(path: str, found: tuple[Resource, str | None] | None):
    assert resource_of(path) == found


def test_resource_of_inverts_path():
    for resource in WATCHED:
        assert resource_of(resource.path(None)) == (resource, None)
        assert resource_of(resource.path("prod")) == (resource, "prod")
    assert MODELS.path("prod", "digits", "status") == (
        "/apis/halimede.dev/v1alpha1/namespaces/prod/inferencemodels/digits/status"
    )
