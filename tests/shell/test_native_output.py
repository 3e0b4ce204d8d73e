"""Output of C++ goes to the log, and the message of a crash goes to stderr."""

import subprocess
import sys

import pytest

HEAD = """
import ctypes, os
from halimede.native_output import divert_cxx_streams
reader = divert_cxx_streams()
assert reader is not None
cxx, libc = ctypes.CDLL("libstdc++.so.6"), ctypes.CDLL(None)
"""
# std::ostream::flush and operator<<(std::ostream&, const char*)
SAY = """
def say(stream, text):
    place = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(cxx, stream)))
    cxx["_ZStlsISt11char_traitsIcEERSt13basic_ostreamIcT_ES5_PKc"](place, text)
    cxx["_ZNSo5flushEv"](place)
"""


def run(code: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-c", HEAD + SAY + code], capture_output=True, timeout=60, check=False)


@pytest.mark.parametrize("stream", ["_ZSt4cerr", "_ZSt4clog"])
def test_streams_of_cxx_are_diverted(stream: str) -> None:
    done = run(f'say("{stream}", b"a line\\n"); print(os.read(reader, 100))')
    assert (done.stdout, done.stderr, done.returncode) == (b"b'a line\\n'\n", b"", 0)


def test_output_of_c_stays_on_stderr() -> None:
    done = run('libc.perror(b"from C"); os.write(2, b"from Python\\n")')
    assert done.stderr.splitlines()[0].startswith(b"from C: ")
    assert done.stderr.endswith(b"from Python\n")


def test_crash_message_reaches_stderr() -> None:
    done = run('cxx["_ZSt9terminatev"]()')
    assert done.returncode < 0
    assert b"terminate called without an active exception" in done.stderr


def test_faulthandler_reaches_stderr() -> None:
    done = run("import faulthandler; faulthandler.enable(); faulthandler._sigsegv()")
    assert done.returncode < 0
    assert b"Fatal Python error: Segmentation fault" in done.stderr
