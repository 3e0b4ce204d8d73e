"""The mutants that measure what tests detect: found, drawn, found again in moved code, and compared."""

from textwrap import dedent

from mutants.apply import Position, apply, effects, locate, mark
from mutants.compare import table
from mutants.draw import Quota, draw
from mutants.find import Kind, Mutant, find
from mutants.reach import read_marks
from mutants.record import GONE, KILLED, SURVIVED, Row

FILE = "server/halimede/queue.py"
SOURCE = dedent('''
    """A module."""

    from __future__ import annotations

    MAX_WAITING = 8


    class Queue:
        def put(self, item, place: int = 1):
            """Add."""
            if len(self.items) >= MAX_WAITING:
                raise ValueError(f"{1 + 1} too many")
            self.items.append(item)
            logger.info("one more %d", 1)

        def move(self, source, target):
            if not source:
                pass
            elif source != target:
                self.swap(source, target)
                self.free(source)

        def __repr__(self):
            return self.text(1)
''').lstrip()  # fmt: skip


def mutant(kind: Kind) -> Mutant:
    [found, *_] = [each for each in find(FILE, SOURCE) if each.kind is kind]
    return found


def test_each_kind_is_found():
    assert [(each.kind, each.symbol, each.text, each.replacement) for each in find(FILE, SOURCE)] == [
        (Kind.CONSTANT, "MAX_WAITING", "MAX_WAITING = 8", "MAX_WAITING = 9"),
        (Kind.CONSTANT, "MAX_WAITING", "MAX_WAITING = 8", "MAX_WAITING = 7"),
        (Kind.CONDITION, "Queue.put", "if len(self.items) >= MAX_WAITING:", "if not (len(self.items) >= MAX_WAITING):"),
        (Kind.COMPARISON, "Queue.put", "if len(self.items) >= MAX_WAITING:", "if len(self.items) > MAX_WAITING:"),
        (Kind.CALL, "Queue.put", "self.items.append(item)", "pass"),
        (Kind.CONDITION, "Queue.move", "if not source:", "if not (not source):"),
        (Kind.CONDITION, "Queue.move", "elif source != target:", "elif not (source != target):"),
        (Kind.COMPARISON, "Queue.move", "elif source != target:", "elif source == target:"),
        (Kind.CALL, "Queue.move", "self.swap(source, target)", "pass"),
        (Kind.ARGUMENTS, "Queue.move", "self.swap(source, target)", "self.swap(target, source)"),
        (Kind.GIVE_BACK, "Queue.move", "self.free(source)", "pass"),
    ]


def test_a_draw_depends_on_the_seed_alone():
    sources = {f"server/halimede/{letter}.py": SOURCE for letter in "abcdef"}
    candidates = [each for file, source in sources.items() for each in find(file, source)]
    quotas = (Quota(2, "server/.*", "^MAX_"), Quota(6, "server/halimede/[a-d]"))

    drawn = draw(candidates, 1, quotas, lambda each: "e.py" not in each.file)

    assert drawn == draw(reversed(candidates), 1, quotas, lambda each: "e.py" not in each.file)
    assert drawn != draw(candidates, 2, quotas, lambda each: "e.py" not in each.file)
    assert [each.symbol for each in drawn[:2]] == ["MAX_WAITING"] * 2
    assert len({(each.file, each.symbol) for each in drawn}) == 8
    assert len({each.kind for each in drawn}) >= 5


def test_a_mutant_survives_moves_of_its_function():
    free = mutant(Kind.GIVE_BACK)
    further_down = SOURCE.replace("MAX_WAITING = 8", "MAX_WAITING = 8\n\nMORE = 1")
    other_class = SOURCE.replace("class Queue:", "class Line:")
    renamed = SOURCE.replace("def move", "def swap")

    for sources in (
        {FILE: SOURCE},
        {FILE: further_down},
        {FILE: other_class},
        {FILE: renamed},
        {FILE: "", "b.py": SOURCE},
    ):
        position = locate(free, sources)
        assert position is not None
        changed = apply(free, sources[position.file], position.line)
        assert changed == sources[position.file].replace("self.free(source)", "pass")


def test_a_mutant_whose_text_is_gone_or_stands_twice_elsewhere_is_gone():
    free = mutant(Kind.GIVE_BACK)
    assert locate(free, {FILE: SOURCE.replace("self.free(source)", "self.free(target)")}) is None
    assert locate(free, {"a.py": SOURCE, "b.py": SOURCE}) is None


def test_the_second_of_equal_lines_is_another_mutant():
    source = "def f():\n    a.close()\n    b()\n    a.close()\n"
    first, second = [each for each in find(FILE, source) if each.kind is Kind.GIVE_BACK]
    assert first.id != second.id
    assert [locate(each, {FILE: source}) for each in (first, second)] == [Position(FILE, 1), Position(FILE, 3)]


def test_a_constant_has_its_effect_where_it_is_used():
    user = "from halimede.queue import MAX_WAITING as MOST\n\ndef f():\n    return MOST\n"
    default = "from halimede.queue import MAX_WAITING\n\ndef f(most=MAX_WAITING):\n    return most\n"
    sources = {
        FILE: SOURCE,
        "server/halimede/user.py": user,
        "server/halimede/default.py": default,
        "other.py": "MAX_WAITING",
    }
    constant = mutant(Kind.CONSTANT)
    position = locate(constant, sources)
    assert position is not None

    assert effects(constant, position, sources) == [
        Position(FILE, 10), Position("server/halimede/user.py", 3), Position("server/halimede/default.py", 3)
    ]  # fmt: skip


def test_marks_are_calls_before_statements():
    reached: list[str] = []
    lines = [
        number
        for number, line in enumerate(SOURCE.splitlines())
        if line.strip().startswith(("if len", "elif source", "self.free", "def put"))
    ]
    source = mark(SOURCE, [(line, str(line)) for line in lines], "_mutant_reached = reached.append\n")
    names = {"reached": reached}
    exec(compile(source, FILE, "exec"), names)
    queue = names["Queue"]()  # type: ignore[operator]
    queue.items, queue.swap, queue.free = [], lambda *_: None, lambda *_: None

    queue.move(1, 1)
    assert reached == ["18"]
    queue.move(1, 2)
    assert reached == ["18", "18", "20"]


def test_a_mark_belongs_to_its_test_and_one_of_a_setup_to_its_file():
    started = [
        "tests/a.py::x\tsetup",
        "tests/a.py::x\tcall",
        "tests/b.py::ä\tsetup",
        "tests/b.py::ä\tcall",
        "tests/b.py::z\tsetup",
    ]
    sizes = [sum(len(line.encode()) + 1 for line in started[: count + 1]) for count in range(len(started))]
    text = f"one 0\none {sizes[1]}\ntwo {sizes[2]}\nthree {sizes[3]}\none {sizes[3]}\n"

    assert read_marks(text, started) == {
        "one": ["tests/a.py::x", "tests/b.py::ä"],
        "two": ["tests/b.py::z", "tests/b.py::ä"],
        "three": ["tests/b.py::ä"],
    }


def test_the_table_names_what_was_killed_before_alone():
    mutants = [mutant(kind) for kind in (Kind.CONDITION, Kind.CALL, Kind.GIVE_BACK, Kind.CONSTANT)]
    ids = [each.id for each in mutants]
    before = {
        ids[0]: Row(ids[0], KILLED, "tests/a.py::x"),
        ids[1]: Row(ids[1], KILLED, "tests/a.py::y"),
        ids[2]: Row(ids[2], KILLED, "tests/a.py::z"),
        ids[3]: Row(ids[3], SURVIVED),
    }
    after = {
        ids[0]: Row(ids[0], KILLED),
        ids[1]: Row(ids[1], SURVIVED),
        ids[2]: Row(ids[2], GONE),
        ids[3]: Row(ids[3], KILLED),
    }

    text, is_kept = table(mutants, before, after)

    assert not is_kept
    assert text.splitlines()[:5] == [
        "before     after      mutants",
        "killed     gone             1",
        "killed     killed           1",
        "killed     survived         1",
        "survived   killed           1",
    ]
    assert f"{ids[1]} {FILE}, Queue.put: self.items.append(item)  ->  pass; before by tests/a.py::y" in text
