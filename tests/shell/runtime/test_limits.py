"""Limits of a process, changed in one of its own."""

import subprocess
import sys

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
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def test_open_files_are_raised_to_what_is_allowed() -> None:
    assert raised(100, 200) == "200 (200, 200)"


def test_a_limit_that_is_as_high_as_it_can_be_stays() -> None:
    assert raised(150, 150) == "150 (150, 150)"


def test_open_files_are_counted_where_no_more_can_be_opened() -> None:
    program = (
        "import resource\nfrom halimede.runtime.limits import count_open_files\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))\nprint(count_open_files())"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "3"
