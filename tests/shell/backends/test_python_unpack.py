"""Unpacking archives of environments, including hostile ones; nothing may appear beside the directory."""

import gzip
import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from halimede.backends.python import unpack as module
from halimede.backends.python.unpack import unpack

Member = tuple[tarfile.TarInfo, bytes]


def member(
    name: str, kind: bytes = tarfile.REGTYPE, *, content: bytes = b"", link: str = "", mode: int = 0o644
) -> Member:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname, info.mode, info.mtime = kind, len(content), link, mode, 1_600_000_000
    return info, content


def folder(name: str) -> Member:
    return member(name, tarfile.DIRTYPE, mode=0o700)


def symlink(name: str, to: str) -> Member:
    return member(name, tarfile.SYMTYPE, link=to)


def archive(path: Path, members: Sequence[Member]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    return path


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "outer" / "env"
    path.mkdir(parents=True)
    return path


def problem(path: Path, target: Path, **bounds: int) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        unpack(path, target, **bounds)
    return str(caught.value)


def test_files_folders_and_links_are_unpacked(tmp_path: Path, target: Path):
    unpack(
        archive(
            tmp_path / "a.tar.gz",
            [
                folder("./"),
                member("bin/run", content=b"#!/bin/sh\n", mode=0o4777),
                folder("lib"),
                member("lib/data", content=b"x" * 3_000_000),
                symlink("lib64", "lib"),
                symlink("bin/up", "../lib/data"),
                symlink("bin/dangling", "../nothing"),
                member("bin/hard", tarfile.LNKTYPE, link="./lib/data"),
                folder("lib"),
            ],
        ),
        target,
    )
    assert (target / "lib64" / "data").read_bytes() == b"x" * 3_000_000
    assert os.path.samefile(target / "bin" / "up", target / "bin" / "hard")
    assert os.readlink(target / "bin" / "dangling") == "../nothing"
    found = (target / "bin" / "run").stat()
    assert (found.st_mode & 0o7777, found.st_mtime) == (0o755, 1_600_000_000)


HOSTILE: dict[str, tuple[Sequence[Member], str]] = {
    "a member above": ([member("../evil")], "'../evil' leads out of it"),
    "a member above, later": ([folder("a"), member("a/../../evil")], "'a/../../evil' leads out of it"),
    "an absolute member": ([member("/tmp/evil")], "'/tmp/evil' leads out of it"),
    "an absolute link": ([symlink("bin/python3", "/usr/bin/python3")], "'bin/python3' is a link to '/usr/bin/python3'"),
    "a link above": ([symlink("a", "..")], "'a' is a link to '..', which leads out of it"),
    "a link far above": ([symlink("a/b/c", "../../../x")], "'a/b/c' is a link to '../../../x', which leads out of it"),
    # To the eye `here/../x` stays inside; to the system it does not, because `here` is where it is.
    "a link through a link": ([symlink("here", "."), symlink("a", "here/../x")], "'a' is a link to 'here/../x'"),
    "a file below a link": ([folder("d"), symlink("l", "d"), member("l/evil")], "'l/evil' lies below 'l', which is no"),
    "a folder over a link": ([folder("d"), symlink("l", "d"), folder("l")], "'l' lies below 'l', which is not"),
    "a file over a link": ([member("f"), symlink("l", "f"), member("l", content=b"x")], "'l' is in it twice"),
    "a file twice": ([member("f"), member("f")], "'f' is in it twice"),
    "a hard link above": ([member("h", tarfile.LNKTYPE, link="../secret")], "'h' leads out of it ('../secret')"),
    "a hard link to a link": (
        [symlink("l", "f"), member("h", tarfile.LNKTYPE, link="l")],
        "'h' is a link to 'l', which is not a file of the archive",
    ),
    "a hard link through a link": (
        [folder("d"), member("d/f"), symlink("l", "d"), member("h", tarfile.LNKTYPE, link="l/f")],
        "'h' is a link to 'l/f', which is not a file of the archive",
    ),
    "a device": ([member("zero", tarfile.CHRTYPE)], "'zero' is a device or a pipe"),
    "a pipe": ([member("p", tarfile.FIFOTYPE)], "'p' is a device or a pipe"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_no_member_leads_out_of_the_directory(tmp_path: Path, target: Path, what: str):
    members, says = HOSTILE[what]
    (tmp_path / "outer" / "secret").write_text("as before")
    text = problem(archive(tmp_path / "a.tar.gz", members), target)
    assert text.startswith(says)
    assert sorted(os.listdir(tmp_path / "outer")) == ["env", "secret"]
    assert (tmp_path / "outer" / "secret").read_text() == "as before"
    for path in target.rglob("*"):
        assert path.resolve().is_relative_to(target)


def test_size_and_number_are_bounded(tmp_path: Path, target: Path):
    path = archive(tmp_path / "a.tar.gz", [member(f"f{number}", content=b"x" * 1_000) for number in range(20)])
    assert problem(path, target, max_bytes=10_000) == "it has more than 10000 bytes unpacked"
    assert len(os.listdir(target)) <= 10
    other = target.parent / "other"
    other.mkdir()
    assert problem(path, other, max_members=5) == "it has more than 5 files and folders"
    assert len(os.listdir(other)) == 5


def test_implicit_parent_folders_are_counted(tmp_path: Path, target: Path):
    path = archive(tmp_path / "a.tar.gz", [member("/".join("abcdefgh"))])
    assert problem(path, target, max_members=5) == "it has more than 5 files and folders"


def test_data_after_the_end_of_the_archive_is_counted(tmp_path: Path, target: Path):
    path = tmp_path / "a.tar.gz"
    with gzip.open(path, "wb", compresslevel=1) as stream:
        stream.write(b"\0" * 3_000_000)
    assert problem(path, target, max_bytes=1_000_000) == "it has more than 1000000 bytes unpacked"


def truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flipped(data: bytes) -> bytes:
    """With another checksum at the end: no reader of tar files looks at it by itself."""
    return data[:-8] + bytes(byte ^ 0xFF for byte in data[-8:-4]) + data[-4:]


@pytest.mark.parametrize(
    "damage", [truncated, flipped, lambda _: b"", lambda _: b"hello", lambda _: gzip.compress(b"x")]
)
def test_damaged_archive_leaves_no_partial_environment(tmp_path: Path, target: Path, damage: Callable[[bytes], bytes]):
    path = archive(tmp_path / "a.tar.gz", [member(f"f{n}", content=os.urandom(10_000)) for n in range(10)])
    path.write_bytes(damage(path.read_bytes()))
    assert problem(path, target).startswith("it is damaged or not a tar.gz: ")


def run(path: Path, target: Path, *before: str) -> tuple[int, str]:
    script = f"import runpy, sys; {';'.join(before) or 'pass'}; sys.argv[0] = {module.__file__!r}; " + (
        f"runpy.run_path({module.__file__!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", script, str(path), str(target)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout.strip()


def test_exit_code_separates_archive_faults_from_system_faults(tmp_path: Path, target: Path):
    good = archive(tmp_path / "good.tar.gz", [member("f", content=b"x")])
    bad = archive(tmp_path / "bad.tar.gz", [member("../\n\x1b[2Jevil")])
    assert run(good, target) == (0, "")
    assert run(bad, target) == (1, "'../\\n\\x1b[2Jevil' leads out of it")
    assert run(good, tmp_path / "nowhere") == (2, "No such file or directory")


def test_huge_header_stays_within_the_memory_limit(tmp_path: Path, target: Path):
    """A name of many gigabytes, compressed to a few megabytes, is read whole by the reader of tar files."""
    path = tmp_path / "a.tar.gz"
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 2 << 30
    with gzip.open(path, "wb", compresslevel=1) as stream:
        stream.write(info.tobuf(tarfile.GNU_FORMAT))
        for _ in range(300):
            stream.write(b"a" * (1 << 20))
    limit = (
        "import resource; real = resource.setrlimit; resource.setrlimit = lambda what, _: real(what, (256 << 20,) * 2)"
    )
    assert run(path, target, limit) == (1, "a header in it is too large")
