"""Which versions of a model are served."""

from collections.abc import Iterable

from halimede.core.config.model_config import ModelVersionPolicy
from halimede.core.types import ErrorCode, InferenceError
from halimede.core.types.error import clip


def select_versions(policy: ModelVersionPolicy | None, available: Iterable[int], model_name: str) -> tuple[int, ...]:
    """The available versions that the policy picks, ascending; INVALID_ARG when that is none.

    Latest means the greatest number, not the newest file; no policy means the latest one. A version that `specific`
    names and that is not there is left out.
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
        text = f"at least one version must be available under the version policy of model '{clip(model_name)}'"
        raise InferenceError(ErrorCode.INVALID_ARG, text)
    return tuple(selected)
