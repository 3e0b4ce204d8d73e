"""The parts of expressions."""

from support.promql import always_true, selectors


def test_selectors_are_found_beside_functions_labels_numbers_and_ranges() -> None:
    expression = """
    topk(20, histogram_quantile(0.99, sum by (le, model) (rate(a_bucket{model=~"x|y", le!="1"}[5m])))) / 1e3
    and on (namespace) group_left (model) (label_replace(b:c:sum, "deployment", "$1", "pod", "(.+)-d") > bool 5)
    or {__name__="e"} unless up
    """
    assert selectors(expression) == ['a_bucket{model=~"x|y", le!="1"}', "b:c:sum", '{__name__="e"}', "up"]


def test_comparisons_outside_of_selectors_keep_every_series() -> None:
    assert always_true('a{b!="1"} == 0 or 2 * c>= 0.5') == 'a{b!="1"} == bool 0 or 2 * c>= bool 0.5'
