"""Finds out whether an optional kind can be watched."""

from collections.abc import Sequence

from halimede_operator.api_server.errors import ApiError
from halimede_operator.cluster.client import KubeClient
from halimede_operator.cluster.kinds import Resource


async def why_unavailable(client: KubeClient, resource: Resource, namespaces: Sequence[str]) -> str:
    """Why the kind cannot be watched; "" if it can. Raises ApiError if the API server fails.

    namespaces: those that are watched; empty: all.
    """
    not_served = f"the cluster does not serve {resource.kind} of {resource.api_version}"
    # kopf looks for a kind in the API server's discovery too, which may be behind the kind itself.
    if not await client.has_kinds(resource.root, frozenset({resource.plural})):
        return not_served
    for namespace in namespaces or (None,):
        try:
            await client.list_one(resource, namespace)
        except ApiError as error:
            if error.status == 404:
                return not_served
            if error.status == 403:
                what = f"the operator may not list {resource.plural}.{resource.group}"
                return f"{what}: the value {resource.chart_value} of its Helm chart gives it the rights"
            raise
    return ""
