"""How much of a resource a pod takes of a quota."""

from fractions import Fraction

from halimede_operator.core.reading import at, objects_at
from halimede_operator.core.snapshot import Object
from halimede_operator.core.spec.quantities import quantity

_PODS = {"pods", "count/pods"}


def amount_of(pod: Object, name: str) -> Fraction:
    """What a quota counts of the pod by this name: `pods`, `limits.memory`, `requests.nvidia.com/gpu`; 0 if it is not
    known.

    As Kubernetes counts it: containers and sidecars run together, and each init container runs beside the sidecars
    before it. What the pod as a whole has replaces that.
    """
    if name in _PODS:
        return Fraction(1)
    kind, resource = ("limits", name.removeprefix("limits.")) if name.startswith("limits.") else ("requests", name)
    resource = resource.removeprefix("requests.")

    def of(container: object) -> Fraction:
        return quantity(at(container, "resources", kind, resource)) or Fraction(0)

    overhead = quantity(at(pod, "spec", "overhead", resource)) or Fraction(0)
    if whole := of(at(pod, "spec")):
        return whole + overhead
    sidecars = most = Fraction(0)
    for each in objects_at(pod, "spec", "initContainers"):
        if each.get("restartPolicy") == "Always":
            sidecars += of(each)
            most = max(most, sidecars)
        else:
            most = max(most, sidecars + of(each))
    together = sidecars + sum((of(each) for each in objects_at(pod, "spec", "containers")), Fraction(0))
    return max(most, together) + overhead
