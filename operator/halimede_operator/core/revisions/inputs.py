"""The inputs of a pod template: the parts of an object's spec that can change it."""

from collections.abc import Mapping

from halimede_operator.core.names import canonical_json, hash_of
from halimede_operator.core.reading import at
from halimede_operator.core.snapshot import Object

_OUTSIDE = frozenset({"autoscaling", "disruption", "networkPolicy", "replicas", "rollout", "suspend"})


def inputs_of(object_: Object, members: Mapping[str, Object]) -> str:
    """The hash of the inputs. It does not depend on the operator: it has what users wrote, without defaults.

    members: the InferenceModels of an ensemble by name. They contribute `spec.model`, and nothing else.
    """
    spec = {name: value for name, value in object_["spec"].items() if name not in _OUTSIDE}
    # The startup probe has it. The rest of `spec.rollout` is outside of the template.
    deadline = at(object_, "spec", "rollout", "progressDeadline")
    models = {name: at(member, "spec", "model") for name, member in members.items()}
    return hash_of(canonical_json([spec, deadline, models]), 32)
