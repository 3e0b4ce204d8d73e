"""Limits of a process, changed in a separate process."""

from support.forked import run_python

PROGRAM = """
import resource
from halimede.runtime.limits import open_files_limit, raise_open_files
soft, hard = {limits}
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
raise_open_files()
print(open_files_limit(), resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def raised(soft: int, hard: int) -> str:
    program = PROGRAM.format(limits=(soft, hard))
    return run_python("-c", program).stdout.strip()


def test_open_files_are_raised_to_the_allowed_maximum() -> None:
    assert raised(100, 200) == "200 (200, 200)"


def test_limit_at_its_maximum_is_unchanged() -> None:
    assert raised(150, 150) == "150 (150, 150)"


def test_open_files_are_counted_when_no_further_file_can_be_opened() -> None:
    program = (
        "import resource\nfrom halimede.runtime.limits import count_open_files\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))\nprint(count_open_files())"
    )
    ran = run_python("-c", program)
    assert ran.stdout.strip() == "3"
