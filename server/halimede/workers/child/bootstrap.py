"""Calls one function of this tree in an interpreter that may have nothing of it installed.

    python bootstrap.py DESCRIPTOR MODULE:FUNCTION [NAME]

The function gets the descriptor, and what it returns is the process's exit code. This is how the zygote is started, and
each worker that has an interpreter of its own (any CPython from 3.10 on); workers that are forked use `call` and `end`
alone. NAME is for whoever reads the list of processes.

`halimede` becomes a package that is only a place to import modules from: our site-packages never come onto the path of
a foreign interpreter, whose compiled modules would not fit. PYTHONPATH counts, since it is how people add modules of
their own; the current folder does not.
"""

import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    # The folder of the script comes first on the path, where its modules would hide others of their names. So nothing
    # may be imported before this.
    del sys.path[0]

import atexit
import os
import signal
import traceback
from contextlib import suppress
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from io import TextIOWrapper
from types import ModuleType
from typing import NoReturn

PATH = os.path.abspath(__file__)


def main(descriptor: int, entry: str) -> NoReturn:
    """Make the interpreter one that a model expects, call the entry and end."""
    os.set_inheritable(descriptor, False)
    _provide_package()
    # As in Triton. A `__main__` that can be found again would be imported by each process that a model starts through
    # multiprocessing.
    sys.modules["__main__"] = ModuleType("__main__")
    sys.argv = [""]
    # A signal that is to end the process ends it, and does not become an exception in the midst of a model.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        # What a model prints is seen at once, is not lost when it is killed, and never fails for its characters.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    end(call(entry, descriptor))


def call(entry: str, descriptor: int) -> int:
    """The exit code that `module:function` returns for the descriptor; 1 for an exception, said on standard error."""
    try:
        module, _, function = entry.partition(":")
        return int(getattr(import_module(module), function)(descriptor))
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        with suppress(BaseException):
            print(ended.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001  # whatever it is, it ends the process, and says so
        with suppress(BaseException):
            traceback.print_exc()
    return 1


def end(code: int) -> NoReturn:
    """End the process as the interpreter would, but without waiting for threads that a model left behind."""
    # A model may have put anything in the place of the streams, and registered anything.
    with suppress(BaseException):
        atexit._run_exitfuncs()
    with suppress(BaseException):
        sys.stdout.flush()
    with suppress(BaseException):
        sys.stderr.flush()
    os._exit(code & 0xFF)


def _provide_package() -> None:
    spec = ModuleSpec("halimede", None, is_package=True)
    spec.submodule_search_locations = [os.path.dirname(os.path.dirname(os.path.dirname(PATH)))]
    sys.modules["halimede"] = module_from_spec(spec)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
