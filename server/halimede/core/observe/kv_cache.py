"""Find the key-value cache of a language model among the metrics that models declare."""

import re
from collections.abc import Iterable
from itertools import islice

from halimede.core.types.kv_cache import KvCache

FAMILY = "nv_trt_llm_kv_cache_block_metrics"
"""The family in which backends of language models, first TensorRT-LLM's, publish it."""

MAX_SERIES = 1_000
"""Maximum number of series to search, some hundred microseconds of work: a model may declare any number."""

_KIND = re.compile(r'(?:^|,)kv_cache_block_type="(tokens_per|used|max)"')


def find_kv_cache(series: Iterable[tuple[str, float]], model: str) -> KvCache | None:
    """The cache of this model; if it has none, as an ensemble, the fullest cache of all models.

    `series` are those of the family: labels as on the page, and values. None if no cache has all three values.
    """
    by_cache: dict[str, dict[str, float]] = {}
    for labels, value in islice(series, MAX_SERIES):
        kind = _KIND.search(labels)
        if kind is not None and value >= 0:
            # Series that differ only in this label belong to one cache.
            by_cache.setdefault(labels[: kind.start()] + labels[kind.end() :], {})[kind[1]] = value
    caches = {
        labels: KvCache(values["used"], values["max"], values["tokens_per"])
        for labels, values in by_cache.items()
        if len(values) == 3
    }
    own = [cache for labels, cache in caches.items() if f'model="{model}"' in labels.split(",")]
    return max(own or caches.values(), key=lambda cache: cache.utilization, default=None)
