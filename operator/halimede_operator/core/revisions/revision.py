"""A revision: a pod template exactly as it was applied, with its fetch plan and the annotations that belong to it.

Plan and template are in one immutable ConfigMap, whose name has the beginning of their hash. So each ReplicaSet has its
own template, without the defaults and additions of the API server. The pods mount only the plan. The ConfigMap exists
as long as the Deployment or one of its ReplicaSets names it.

The whole hash is an annotation of the Deployment, and the Deployment's controller copies annotations to its
ReplicaSets. What is read from a ConfigMap is used only if it has this hash: users who may write ConfigMaps, but no
workloads, must not choose the pods that the operator creates.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from halimede_operator.core.labels import GENERATION, INPUTS, PLACEMENT, POD_SETTINGS, REVISION_LABEL, TEMPLATE_HASH
from halimede_operator.core.names import canonical_json, hash_of
from halimede_operator.core.reading import at, decimal, text_at
from halimede_operator.core.snapshot import Object
from halimede_operator.core.spec.types import Json

PLAN_FILE = "plan.json"
TEMPLATE_FILE = "pod-template.json"
CONFIG_VOLUME = "config"
THIS_CONFIG_MAP = "<this ConfigMap>"
"""In the stored template: the name of the ConfigMap that has it. No object can have this name."""
MAX_BYTES = 1_000_000
"""The API server refuses a ConfigMap with more than 1 MiB. A larger template is not stored: then a revision cannot be
kept, and what the operator builds is always applied."""

ANNOTATIONS = (INPUTS, GENERATION, PLACEMENT, POD_SETTINGS)
"""What belongs to a revision: the Deployment has these annotations of its current revision, and each ReplicaSet those
of its own."""

_HASH_DIGITS = 32
_NAME_DIGITS = 8


@dataclass(frozen=True, slots=True)
class Revision:
    plan: str
    template: str
    """Canonical JSON, with THIS_CONFIG_MAP and without the revision's label."""
    hash: str
    annotations: Mapping[str, str]
    """Those of ANNOTATIONS that are known."""

    @property
    def name(self) -> str:
        """The pods' label, and the end of the ConfigMap's name."""
        return name_of(self.hash)

    @property
    def generation(self) -> int:
        """The object's generation that it was made for; 0 if it is not known."""
        return decimal(self.annotations.get(GENERATION)) or 0

    @property
    def data(self) -> dict[str, str]:
        """The ConfigMap's content."""
        whole = {PLAN_FILE: self.plan, TEMPLATE_FILE: self.template}
        if sum(len(text.encode("utf-8", "surrogatepass")) for text in whole.values()) > MAX_BYTES:
            del whole[TEMPLATE_FILE]
        return whole

    def pod_template(self, config_map: str) -> dict[str, Any]:
        """The template to apply. config_map: the name of the revision's ConfigMap."""
        template: dict[str, Any] = json.loads(self.template)
        template["metadata"]["labels"][REVISION_LABEL] = self.name
        for volume in template["spec"]["volumes"]:
            if text_at(volume, "configMap", "name") == THIS_CONFIG_MAP:
                volume["configMap"]["name"] = config_map
        return template

    def has(self, annotations: Mapping[str, str]) -> bool:
        """Whether the revision has these annotations."""
        return all(self.annotations.get(name, "") == value for name, value in annotations.items())


def revision(plan: str, template: Json, annotations: Mapping[str, str]) -> Revision:
    """A revision that the operator builds. template: in canonical form, with THIS_CONFIG_MAP."""
    text = canonical_json(template)
    return Revision(plan, text, _hash(plan, text), annotations)


def name_of(hash_: str) -> str:
    return hash_[:_NAME_DIGITS]


def _hash(plan: str, template: str) -> str:
    return hash_of(canonical_json([plan, template]), _HASH_DIGITS)


def applied(workload: Object | None, config_maps: Iterable[Object]) -> Revision | None:
    """The revision that the annotations of a Deployment or a ReplicaSet name.

    None if they name none, or if no ConfigMap has its content.
    """
    hash_ = text_at(workload, "metadata", "annotations", TEMPLATE_HASH)
    found = {name: text_at(workload, "metadata", "annotations", name) for name in ANNOTATIONS}
    end = f"-{name_of(hash_)}"
    for each in config_maps:
        plan, template = (at(each, "data", file) for file in (PLAN_FILE, TEMPLATE_FILE))
        if not text_at(each, "metadata", "name").endswith(end) or not isinstance(plan, str):
            continue
        if isinstance(template, str) and _hash(plan, template) == hash_:
            return Revision(plan, template, hash_, {name: text for name, text in found.items() if text})
    return None


def revision_label(workload: Object | None) -> str:
    """The revision's name in the pod template of a Deployment; "" if there is none."""
    return text_at(workload, "spec", "template", "metadata", "labels", REVISION_LABEL)
