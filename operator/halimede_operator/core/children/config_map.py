"""The ConfigMap of a revision: the fetch plan and the pod template.

Its name has a hash of its content, so that it never changes: new content is a new ConfigMap and so a new pod template,
and pods of the old template keep their ConfigMap.
"""

import math

from halimede_operator.core.children.content import Content
from halimede_operator.core.children.metadata import metadata
from halimede_operator.core.children.source import Source, stores
from halimede_operator.core.names import child_name
from halimede_operator.core.platform import Platform
from halimede_operator.core.revisions.revision import Revision
from halimede_operator.core.spec.quantities import quantity
from halimede_operator.core.spec.types import CacheMedium, Json, Key, Workload
from halimede_spec.fetch_plan import PlanDocument, write_plan


def fetch_plan(content: Content, sources: tuple[Source, ...], workload: Workload, platform: Platform) -> str:
    """The plan that `halimede fetch` reads, as canonical JSON without empty parts."""
    plan: PlanDocument = {"models": [source.plan for source in sources]}
    if content.ensembles:
        plan["ensembles"] = [{"name": each.name, "config": each.config} for each in content.ensembles]
    if (known := stores(platform)) is not None:
        plan["stores"] = known
    if workload.cache.medium is not CacheMedium.EMPTY_DIR:
        plan["cache"] = {"path": platform.paths.cache}
        if workload.cache.size_limit is not None and (limit := quantity(workload.cache.size_limit)) is not None:
            plan["cache"]["size_limit_bytes"] = math.ceil(limit)
    return write_plan(plan)


def config_map(key: Key, uid: str, revision: Revision) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(key, uid, child_name(key.name, f"config-{revision.name}")),
        "immutable": True,
        "data": revision.data,
    }
