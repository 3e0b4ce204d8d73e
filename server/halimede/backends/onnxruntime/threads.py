"""How many threads a model's sessions get, and whether its instances share one."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ThreadPlan:
    """`intra` and `inter` are thread counts of one session; `spin` lets idle threads spin for work."""

    intra: int
    inter: int
    spin: bool
    share: bool


def plan_threads(
    cores: int, instances: int, *, intra: int = 0, inter: int = 0, parallel: bool = False, can_share: bool = True
) -> ThreadPlan:
    """Threads for `instances` instances on `cores` cores; `intra` and `inter` are configured counts, 0 if not set.

    By default each instance gets an equal part of the cores. If there are more threads than cores they must not spin,
    because that slows all of them down several times.

    The instances share one session, which runs any number of batches at once and holds the weights once, unless the
    configuration asks for several threads per instance: a shared pool could not limit each instance. The pool of a
    shared session is as large as the instances' own pools together; each caller's own thread computes too.
    """
    each = intra or max(1, cores // instances)
    spin = instances * each <= cores
    if instances == 1 or parallel or intra > 1 or not can_share:
        return ThreadPlan(each, inter or (each if parallel else 1), spin, share=can_share and instances == 1)
    return ThreadPlan(instances * (each - 1) + 1, inter or 1, spin, share=True)
