"""The golden file of children: it shows which objects' pods a change of the operator would roll."""

from support.operator_golden import GOLDEN, REGENERATE, golden, templates


def test_children_are_those_of_the_golden_file():
    """O-24."""
    before, after = GOLDEN.read_text(), golden()
    rolled = [
        name for name, template in templates(before).items() if templates(after).get(name) not in (None, template)
    ]
    what = f"an upgrade would roll the pods of {len(rolled)} of these objects: {', '.join(rolled)}; " if rolled else ""
    assert after == before, f"{what}if that is meant, run `{REGENERATE}` and commit what it writes"


def test_the_golden_file_covers_enough_objects():
    found = templates(GOLDEN.read_text())
    assert len(found) > 40
    assert len(set(found.values())) > 30
