"""The cache of keys and values behind a model, found among the metrics that models make."""

import re
from collections.abc import Iterable
from itertools import islice

from halimede.core.types.kv_cache import KvCache

FAMILY = "nv_trt_llm_kv_cache_block_metrics"
"""The family by which backends of language models tell it, TensorRT-LLM's first."""

MAX_SERIES = 1_000
"""So many series are looked at, some hundred microseconds of work: a model may make any number."""

_KIND = re.compile(r'(?:^|,)kv_cache_block_type="(tokens_per|used|max)"')


def find_kv_cache(series: Iterable[tuple[str, float]], model: str) -> KvCache | None:
    """The cache of this model; where it has none, as an ensemble does, the fullest of all.

    `series` are the family's: labels as the page has them, and values. None unless one cache is told whole.
    """
    told: dict[str, dict[str, float]] = {}
    for labels, value in islice(series, MAX_SERIES):
        kind = _KIND.search(labels)
        if kind is not None and value >= 0:
            # Series that differ in nothing else are of one cache.
            told.setdefault(labels[: kind.start()] + labels[kind.end() :], {})[kind[1]] = value
    caches = {
        labels: KvCache(values["used"], values["max"], values["tokens_per"])
        for labels, values in told.items()
        if len(values) == 3
    }
    own = [cache for labels, cache in caches.items() if f'model="{model}"' in labels.split(",")]
    return max(own or caches.values(), key=lambda cache: cache.utilization, default=None)
