"""`Logger`: lines of the server's log."""

import os
import sys

from halimede.backends.python.utils.arguments import ProtocolNumber, instance_of, text_of
from halimede.backends.python.utils.session import current


class LogLevel(ProtocolNumber):
    """The protocol's numbers."""

    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3


class Logger:
    """Static methods only."""

    __module__ = "c_python_backend_utils"
    __slots__ = ()

    LogLevel = LogLevel
    INFO = LogLevel.INFO
    WARNING = LogLevel.WARNING
    ERROR = LogLevel.ERROR
    VERBOSE = LogLevel.VERBOSE

    @staticmethod
    def log(message: str, level: ProtocolNumber = LogLevel.INFO) -> None:
        _say(instance_of(level, LogLevel, "log", "level").name, text_of(message, "log", "message"))

    @staticmethod
    def log_info(message: str) -> None:
        _say("INFO", text_of(message, "log_info", "message"))

    @staticmethod
    def log_warn(message: str) -> None:
        _say("WARNING", text_of(message, "log_warn", "message"))

    @staticmethod
    def log_error(message: str) -> None:
        _say("ERROR", text_of(message, "log_error", "message"))

    @staticmethod
    def log_verbose(message: str) -> None:
        _say("VERBOSE", text_of(message, "log_verbose", "message"))


def _say(level: str, message: str) -> None:
    # Two frames up is the model's own line, which the log shows as the line's origin.
    caller = sys._getframe(2)
    current().host.log(level, message, f"{os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno}")
