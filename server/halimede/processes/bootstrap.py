"""Calls one function of this package in an interpreter in which the package may not be installed.

    python bootstrap.py DESCRIPTOR MODULE:FUNCTION [NAME]

The function gets the descriptor and returns the process's exit code. The zygote is started in this way, and each worker
with its own interpreter (any CPython from 3.10 on); forked workers only use `call` and `end`. NAME only appears in
lists of processes.

`halimede` becomes a package that is only a search path for its modules. The server's site-packages are not added to the
path of another interpreter, because their compiled modules would be incompatible. PYTHONPATH has its effect, because
users add modules with it; the current folder is not on the path.
"""

import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    # The folder of the script is first on the path, where its modules would hide others of the same name. So no import
    # may precede this.
    del sys.path[0]

import atexit
import os
import signal
import traceback
from contextlib import suppress
from importlib import import_module
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import module_from_spec
from io import TextIOWrapper
from types import ModuleType
from typing import NoReturn

PATH = os.path.abspath(__file__)


def main(descriptor: int, entry: str) -> NoReturn:
    """Set up the interpreter as models expect it, call the entry and end."""
    os.set_inheritable(descriptor, False)
    _provide_package()
    # As in Triton. Each process that a model starts through multiprocessing would import a `__main__` with a file.
    sys.modules["__main__"] = ModuleType("__main__")
    sys.argv = [""]
    # SIGINT ends the process instead of raising an exception in the model's code.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if "PYTHONBREAKPOINT" not in os.environ:
        sys.breakpointhook = _refuse_breakpoint
    for stream in (sys.stdout, sys.stderr):
        # Output of a model is visible at once, is not lost if it is killed, and never fails because of its characters.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    end(call(entry, descriptor))


def call(entry: str, descriptor: int) -> int:
    """The exit code that `module:function` returns for the descriptor; 1 for an exception, which is printed."""
    try:
        module, _, function = entry.partition(":")
        return int(getattr(import_module(module), function)(descriptor))
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        with suppress(BaseException):
            print(ended.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001  # any exception ends the process and is printed
        with suppress(BaseException):
            traceback.print_exc()
    return 1


def end(code: int) -> NoReturn:
    """End the process as the interpreter would, but without waiting for threads of the model."""
    # A model may have replaced the streams, and may have registered any function.
    with suppress(BaseException):
        atexit._run_exitfuncs()
    with suppress(BaseException):
        sys.stdout.flush()
    with suppress(BaseException):
        sys.stderr.flush()
    os._exit(code & 0xFF)


def _refuse_breakpoint(*_args: object, **_more: object) -> NoReturn:
    from halimede.backends.python.utils.errors import NO_DEBUGGER

    raise RuntimeError(NO_DEBUGGER)


def _provide_package() -> None:
    folder = os.path.dirname(os.path.dirname(PATH))
    loader = SourceFileLoader("halimede", os.path.join(folder, "__init__.py"))
    spec = ModuleSpec("halimede", loader, is_package=True)
    spec.submodule_search_locations = [folder]
    package = sys.modules["halimede"] = module_from_spec(spec)
    loader.exec_module(package)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
