"""Finding the key-value cache among the metrics that models declare."""

from halimede.core.observe.custom_metrics import CustomMetrics
from halimede.core.observe.kv_cache import FAMILY, find_kv_cache
from halimede.core.types.kv_cache import KvCache


def metrics(**models: tuple[float, ...]) -> CustomMetrics:
    """Of each model used, max and tokens_per, as many as are given."""
    made = CustomMetrics()
    for model, values in models.items():
        family = made.new_family(model, FAMILY, "blocks", "GAUGE")
        for kind, value in zip(("used", "max", "tokens_per"), values, strict=False):
            labels = {"kv_cache_block_type": kind, "model": model, "version": "1"}
            made.update(model, made.new_metric(model, family, labels, None), "set", value)
    return made


def found(made: CustomMetrics, model: str) -> KvCache | None:
    return find_kv_cache(made.series(FAMILY), model)


def test_a_model_has_its_own_cache() -> None:
    made = metrics(a=(1, 4, 64), b=(8, 10, 32))
    assert found(made, "a") == KvCache(1, 4, 64)
    assert found(made, "b") == KvCache(8, 10, 32)


def test_model_without_a_cache_gets_the_fullest_one() -> None:
    assert found(metrics(a=(1, 4, 64), b=(8, 10, 32)), "ensemble") == KvCache(8, 10, 32)


def test_incomplete_or_missing_series_give_no_cache() -> None:
    assert found(CustomMetrics(), "a") is None
    assert found(metrics(a=(1, 4)), "a") is None
    assert found(metrics(a=(-1, 4, 64)), "a") is None
    histogram = CustomMetrics()
    histogram.new_metric("a", histogram.new_family("a", FAMILY, "blocks", "HISTOGRAM"), {}, [1.0])
    assert found(histogram, "a") is None
