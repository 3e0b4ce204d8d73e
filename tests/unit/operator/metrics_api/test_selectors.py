"""metricLabelSelector: what clients of Kubernetes write, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halimede_operator.metrics_api.core.errors import MetricsError, Reason
from halimede_operator.metrics_api.core.selectors import Operator, Requirement, as_label_selector, parse_selector

IN, NOT_IN, EXISTS, ABSENT = Operator.IN, Operator.NOT_IN, Operator.EXISTS, Operator.DOES_NOT_EXIST


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ()),
        ("model=bert", (Requirement("model", IN, ("bert",)),)),
        ("model==bert", (Requirement("model", IN, ("bert",)),)),
        ("model = bert", (Requirement("model", IN, ("bert",)),)),
        ("model=", (Requirement("model", IN, ("",)),)),
        ("model!=bert", (Requirement("model", NOT_IN, ("bert",)),)),
        ("model in (a,b)", (Requirement("model", IN, ("a", "b")),)),
        ("model notin (a, b),version", (Requirement("model", NOT_IN, ("a", "b")), Requirement("version", EXISTS))),
        ("!device,in=notin", (Requirement("device", ABSENT), Requirement("in", IN, ("notin",)))),
    ],
)
def test_selectors_are_read(text: str, expected: tuple[Requirement, ...]) -> None:
    assert parse_selector(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("halimede.dev/model=a", "is no label of Prometheus"),
        ('model="a"', "is no label value"),
        ("model=a b", "write label=value"),
        ("model in (a", "write label=value"),
        ("model=a,,b=c", "write label=value"),
        ("model in (a,b))", "write label=value"),
        ("replicas>3", "is no label of Prometheus"),
        (f"model={'a' * 64}", "is no label value"),
        (",".join(["a=b"] * 33), "more than 32 requirements"),
        (f"a in ({','.join(['b'] * 257)})", "more than 256 values"),
    ],
)
def test_other_selectors_are_refused(text: str, message: str) -> None:
    with pytest.raises(MetricsError, match=message) as error:
        parse_selector(text)
    assert error.value.reason is Reason.BadRequest


@given(st.text(alphabet='ab=!(), \n"\\in{}', max_size=40))
def test_any_text_is_a_selector_or_refused(text: str) -> None:
    try:
        found = parse_selector(text)
    except MetricsError:
        return
    for each in found:
        assert each.label.isidentifier()
        assert all(not value or value.isalnum() for value in each.values)


def test_a_selector_is_shown_as_an_object() -> None:
    assert as_label_selector(()) is None
    assert as_label_selector((Requirement("a", IN, ("x",)), Requirement("b", EXISTS))) == {
        "matchExpressions": [{"key": "a", "operator": "In", "values": ["x"]}, {"key": "b", "operator": "Exists"}]
    }
