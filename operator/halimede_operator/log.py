"""Log lines of the operator's processes, on standard error."""

import datetime
import logging
from typing import Any

import orjson


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line).decode()


class TextFormatter(logging.Formatter):
    """A message is one line, and what follows of its exception is indented. So no name that users chose, and no text
    of the API server, can look like another line or control a terminal."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the library's name
        return _printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802 - the library's name; Any: its type is not public
        return "\n".join(f"    {_printable(line)}" for line in super().formatException(ei).splitlines())


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape", "surrogatepass").decode() for each in text
    )


def set_up_logging(log_format: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    # kopf logs each failed request. We log the error that ended kopf ourselves.
    logging.getLogger("kopf").setLevel(logging.CRITICAL)
    logging.getLogger("kopf._cogs.clients").setLevel(logging.ERROR)
