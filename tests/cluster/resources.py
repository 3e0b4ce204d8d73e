"""Objects of a namespace by the names that kubectl has for them, read without its processes.

A test that waits looks ten times a second, and each process of kubectl takes a tenth of a second of a processor.
"""

from typing import Any
from urllib.parse import urlencode

from cluster.api import Api

GROUPS = {
    "configmaps": "",
    "events": "",
    "pods": "",
    "serviceaccounts": "",
    "services": "",
    "deployments": "apps/v1",
    "replicasets": "apps/v1",
    "horizontalpodautoscalers": "autoscaling/v2",
    "leases": "coordination.k8s.io/v1",
    "endpointslices": "discovery.k8s.io/v1",
    "inferencemodels": "halimede.dev/v1alpha1",
    "modelensembles": "halimede.dev/v1alpha1",
    "networkpolicies": "networking.k8s.io/v1",
    "poddisruptionbudgets": "policy/v1",
}
"""The group and version of each kind, by its plural; "" for the core."""
SHORT = {
    "hpa": "horizontalpodautoscalers",
    "im": "inferencemodels",
    "mens": "modelensembles",
    "pdb": "poddisruptionbudgets",
}
SELECTORS = {"--selector": "labelSelector", "--field-selector": "fieldSelector"}


def get(api: Api, namespace: str, what: str, *arguments: str) -> dict[str, Any]:
    """One object for `KIND/NAME`, or KIND and NAME; a list for KIND, which `--selector` and `--field-selector` narrow."""
    kind, _, name = what.partition("/")
    if arguments and not arguments[0].startswith("--"):
        (name,) = arguments
        arguments = ()
    plural = plural_of(kind)
    group = GROUPS[plural]
    path = f"{f'/apis/{group}' if group else '/api/v1'}/namespaces/{namespace}/{plural}"
    options = dict(each.split("=", 1) for each in arguments)
    query = urlencode({SELECTORS[option]: value for option, value in options.items()})
    found: dict[str, Any] = api.get(f"{path}/{name}" if name else f"{path}?{query}")
    return found


def names(api: Api, namespace: str, kinds: str, *arguments: str) -> set[str]:
    """As kubectl prints them: `pod/NAME`, `deployment.apps/NAME`. kinds: with commas between them."""
    return {
        f"{full_name(plural_of(kind))}/{each['metadata']['name']}"
        for kind in kinds.split(",")
        for each in get(api, namespace, kind, *arguments)["items"]
    }


def plural_of(kind: str) -> str:
    """The plural of a kind's plural, singular or short name, or of what kubectl prints with its group."""
    name = kind.partition(".")[0].lower()
    name = SHORT.get(name, name)
    [plural] = [each for each in GROUPS if name in (each, singular_of(each))]
    return plural


def singular_of(plural: str) -> str:
    return f"{plural[:-3]}y" if plural.endswith("ies") else plural[:-1]


def full_name(plural: str) -> str:
    group = GROUPS[plural].partition("/")[0]
    return f"{singular_of(plural)}.{group}" if group else singular_of(plural)
