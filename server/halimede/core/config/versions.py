"""Selection of the versions of a model to serve."""

from collections.abc import Iterable

from halimede.core.config.model_config import ModelVersionPolicy
from halimede.core.types.error import clip, invalid


def select_versions(policy: ModelVersionPolicy | None, available: Iterable[int], model_name: str) -> tuple[int, ...]:
    """The available versions that the policy selects, ascending; InferenceError INVALID_ARG if it selects none.

    "Latest" means the greatest number, not the newest file; without a policy only the latest version is served.
    Versions that `specific` lists but that do not exist are ignored.
    """
    versions = sorted(set(available))
    if policy is None or policy == ModelVersionPolicy():
        selected = versions[-1:]
    elif policy.all is not None:
        selected = versions
    elif policy.specific is not None:
        wanted = set(policy.specific.versions)
        selected = [version for version in versions if version in wanted]
    else:
        count = policy.latest.num_versions if policy.latest is not None else 0
        selected = versions[-count:] if count > 0 else []
    if not selected:
        raise invalid(f"at least one version must be available under the version policy of model '{clip(model_name)}'")
    return tuple(selected)
