"""The paths of a pod are arguments: processes outside a pod may have others."""

import json
import re
from dataclasses import fields, replace

from halimede_operator.core.platform import PodPaths
from halimede_operator.core.spec.types import CaBundle, Cache, CacheMedium
from support.operator_children import children_of
from support.operator_specs import PLATFORM, model_spec, workload

OF_HTTP = {"/metrics", "/v2/health/live", "/v2/health/ready"}


def test_children_have_the_given_paths_and_no_others() -> None:
    paths = PodPaths(**{field.name: f"/given/{field.name}" for field in fields(PodPaths)})
    platform = replace(PLATFORM, s3_secret="models-s3", cache_host_path="/given/cache_host_path", paths=paths)
    cached = workload(cache=Cache(CacheMedium.HOST_PATH))
    specs = [
        model_spec(uri="pvc://claim/bert", credentials_secret="keys", ca_bundle=CaBundle("ca", "root.pem")),
        model_spec(uri="file:///given/files/bert"),
        model_spec(workload=cached),
    ]
    text = json.dumps([children_of(spec, platform=platform) for spec in specs])
    # A slash that begins a path, neither one inside a name like apps/v1 nor one of s3://.
    found = set(re.findall(r"(?<![\w/:])/[\w./-]+", text)) - OF_HTTP
    given = {f"/given/{name}" for name in ("cache_host_path", "files", *(field.name for field in fields(PodPaths)))}
    assert {"/".join(path.split("/")[:3]) for path in found} == given
