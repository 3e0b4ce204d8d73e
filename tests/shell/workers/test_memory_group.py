"""The memory that a container's control groups allow: played files, and a real group."""

from pathlib import Path

import pytest

from halimede.memory_group import UNLIMITED, MemoryGroups, MemoryUse
from support.forked import run_python
from support.memory_group import joining, memory_group

MIB = 1 << 20

VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file")
VERSION_2 = ("memory.max", "memory.current", "inactive_file", "active_file")


def write(folder: Path, names: tuple[str, str, str, str], limit: int | str, used: int, cache: int = 0) -> None:
    """A group's files; half of the file cache is active."""
    folder.mkdir(parents=True, exist_ok=True)
    limit_name, used_name, inactive, active = names
    (folder / limit_name).write_text(f"{limit}\n")
    (folder / used_name).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon {used}\n{inactive} {cache // 2}\n{active} {cache // 2}\n")


def machine(root: Path, cgroup: str = "") -> MemoryGroups:
    if cgroup:
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/cgroup").write_text(cgroup)
    return MemoryGroups(root / "proc", root / "cgroup")


@pytest.mark.parametrize(
    ("names", "top", "line"),
    [(VERSION_2, "cgroup", "0::/pod/one\n"), (VERSION_1, "cgroup/memory", "3:cpu:/\n7:memory:/pod/one\n0::/\n")],
    ids=["version 2", "version 1"],
)
def test_the_smallest_limit_of_a_group_and_those_above_it_counts(
    tmp_path: Path, names: tuple[str, str, str, str], top: str, line: str
):
    write(tmp_path / top, names, "max" if names is VERSION_2 else 9223372036854771712, 900 * MIB)
    write(tmp_path / top / "pod", names, 512 * MIB, 100 * MIB)
    write(tmp_path / top / "pod/one", names, 800 * MIB, 10 * MIB)
    groups = machine(tmp_path, line)

    assert groups.limit_bytes == 512 * MIB
    assert groups.read() == MemoryUse(512 * MIB, 100 * MIB, 0, 0)
    assert [groups.has_free(412 * MIB), groups.has_free(412 * MIB + 1)] == [True, False]


@pytest.mark.parametrize(
    ("names", "line", "file", "text", "kills"),
    [
        (VERSION_2, "0::/one\n", "cgroup/one/memory.events", "low 0\noom 4\noom_kill 3\noom_group_kill 1\n", 3),
        (VERSION_2, "0::/on/the/host\n", "cgroup/memory.events", "oom_kill 2\n", 2),
        (
            *(VERSION_1, "5:cpu,cpuacct:/x\n4:memory:/a:b\n", "cgroup/memory/a:b/memory.oom_control"),
            *("oom_kill_disable 0\nunder_oom 0\noom_kill 7\n", 7),
        ),
        (VERSION_1, "4:memory:/a\n", "cgroup/memory/a/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\n", 0),
        (VERSION_2, "0::/\n", "cgroup/another.file", "oom_kill 1\n", 0),
        (VERSION_2, "0::/\n", "cgroup/memory.events", "oom_kill many times\n", 0),
    ],
    ids=["version 2", "the root", "version 1", "no count", "no file", "no number"],
)
def test_processes_that_the_kernel_killed_are_counted(
    tmp_path: Path, names: tuple[str, str, str, str], line: str, file: str, text: str, kills: int
):
    write((tmp_path / file).parent, names, 512 * MIB, 0)
    (tmp_path / file).write_text(text)

    assert machine(tmp_path, line).oom_kills() == kills


def test_without_groups_no_killed_process_is_counted(tmp_path: Path):
    assert machine(tmp_path).oom_kills() == 0


def test_a_group_above_may_be_full_first(tmp_path: Path):
    write(tmp_path / "cgroup/pod", VERSION_2, 512 * MIB, 500 * MIB)
    write(tmp_path / "cgroup/pod/one", VERSION_2, 256 * MIB, 10 * MIB)
    groups = machine(tmp_path, "0::/pod/one\n")

    assert groups.limit_bytes == 256 * MIB
    assert [groups.has_free(12 * MIB), groups.has_free(13 * MIB)] == [True, False]

    write(tmp_path / "cgroup/pod/one", VERSION_2, 256 * MIB, 250 * MIB)

    assert [groups.has_free(6 * MIB), groups.has_free(7 * MIB)] == [True, False]


def test_file_cache_counts_as_free(tmp_path: Path):
    write(tmp_path / "cgroup", VERSION_2, 100 * MIB, 90 * MIB, cache=60 * MIB)
    groups = machine(tmp_path)

    assert groups.read() == MemoryUse(100 * MIB, 90 * MIB, 30 * MIB, 60 * MIB)
    assert [groups.has_free(70 * MIB), groups.has_free(71 * MIB)] == [True, False]


def test_the_path_on_the_host_need_not_exist_in_the_container(tmp_path: Path):
    write(tmp_path / "cgroup/memory", VERSION_1, 100 * MIB, 40 * MIB)
    groups = machine(tmp_path, "7:memory:/docker/0123\n0::/\n")

    assert (groups.limit_bytes, groups.has_free(61 * MIB)) == (100 * MIB, False)


@pytest.mark.parametrize("cgroup", ["", "0::/../other\n", "0::/a\n7:memory:/a\n"])
def test_without_groups_nothing_is_limited(tmp_path: Path, cgroup: str):
    (tmp_path / "cgroup").mkdir()
    write(tmp_path / "other", VERSION_2, 512 * MIB, 0)
    groups = machine(tmp_path, cgroup)

    assert (groups.limit_bytes, groups.read(), groups.has_free(1 << 60)) == (UNLIMITED, None, True)


IN_A_GROUP = """
from halimede.memory_group import memory_bounds
from halimede.channel.segments import make_segment
bounds = memory_bounds()
print(bounds.total_bytes, bounds.at_most(1 << 30), bounds.has_free(1 << 20), bounds.has_free(64 << 20))
print([make_segment(each << 20) is not None for each in (65, 16, 65)])
used = b"x" * (40 << 20)
print(make_segment(16 << 20) is not None)
"""


def test_segments_of_a_process_in_a_real_group_are_within_its_memory():
    with memory_group(64 * MIB) as group:
        ran = run_python("-c", f"{joining(group)}\n{IN_A_GROUP}")

        assert ran.stdout == (f"{64 * MIB} {16 * MIB} True False\n[False, True, False]\nFalse\n"), ran.stderr


REFUSED_BATCH = f"""
import asyncio, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from halimede.core.types import InferenceError
from support.channel import item
from support.working import working

async def main():
    large = item(1, 40 << 20)
    used = b"x" * (50 << 20)
    async with working() as (each, _):
        for _ in range(2):
            each.connection.batches.execute([large], 0)
            await each.until(lambda: each.heard.done, "the end of the batch")
            [reply] = each.heard.done.pop()[1].replies
            print(reply if isinstance(reply, InferenceError) else len(reply.outputs[0].data))
            del reply
            used = b""

asyncio.run(main())
"""


def test_a_batch_without_memory_to_pass_it_on_is_refused():
    with memory_group(128 * MIB) as group:
        ran = run_python("-c", f"{joining(group)}\n{REFUSED_BATCH}")

        assert ran.stdout.splitlines() == [
            f"the server has too little free memory to pass {40 * MIB} bytes to another process",
            str(40 * MIB),
        ], ran.stderr
        assert ran.returncode == 0, ran.stderr


def test_groups_that_this_process_may_not_read_limit_nothing(tmp_path: Path):
    write(tmp_path / "cgroup/pod", VERSION_2, 512 * MIB, 0)
    (tmp_path / "cgroup").chmod(0)
    program = f"""
import os, pathlib
from halimede.memory_group import UNLIMITED, MemoryGroups
os.setuid(os.getuid() or 65534)
groups = MemoryGroups(pathlib.Path("/proc"), pathlib.Path({str(tmp_path / "cgroup")!r}))
assert (groups.limit_bytes, groups.read(), groups.has_free(1)) == (UNLIMITED, None, True)
"""
    done = run_python("-c", program)
    (tmp_path / "cgroup").chmod(0o700)

    assert (done.returncode, done.stderr) == (0, "")


def test_the_name_of_a_group_may_be_no_utf8(tmp_path: Path):
    write(tmp_path / "cgroup/pod", VERSION_2, 512 * MIB, 0)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_bytes(b"0::/pod/\xff\n")

    assert machine(tmp_path).limit_bytes == 512 * MIB
