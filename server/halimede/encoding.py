"""The encoding of file names: UTF-8, as in clients' requests, whatever the locale says."""

import os
import sys


def use_utf8() -> None:
    """Start this program again in Python's UTF-8 mode if Python decodes file names otherwise.

    It does so in the locale `C` with PYTHONUTF8=0, and the mode cannot be changed later. Worker processes inherit it.
    """
    # Python may ignore the variable (`python -E`): no second try.
    if sys.getfilesystemencoding() == "utf-8" or os.environ.get("PYTHONUTF8") == "1":
        return
    os.environ["PYTHONUTF8"] = "1"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606  # this program
