"""Log lines in Triton's default form, on stderr: `I1121 07:50:51.767849 597 server.py:42] "text"`, times in UTC."""

import json
import logging
import time

from halimede.settings import Settings

PACKAGE = "halimede"


def severity(level: int) -> str:
    """Triton's letter for a level: E, W, I, or V for verbose."""
    if level >= logging.ERROR:
        return "E"
    if level >= logging.WARNING:
        return "W"
    return "I" if level >= logging.INFO else "V"


class TritonFormatter(logging.Formatter):
    """One line per message. A record with `raw` set (a table) is printed as it is, below its line's head."""

    def format(self, record: logging.LogRecord) -> str:
        seconds, micros = divmod(round(record.created * 1_000_000), 1_000_000)
        at = time.strftime("%m%d %H:%M:%S", time.gmtime(seconds))
        head = f"{severity(record.levelno)}{at}.{micros:06d} {record.process} {record.filename}:{record.lineno}]"
        message = record.getMessage()
        # Quoted, so that what a client sent can never look like a line of its own.
        line = (
            f"{head}\n{message}"
            if getattr(record, "raw", False)
            else f"{head} {json.dumps(message, ensure_ascii=False)}"
        )
        if record.exc_info:
            traceback = self.formatException(record.exc_info)
            line += "".join(f"\n  {each}" for each in traceback.splitlines())
        return line


def configure(settings: Settings) -> None:
    """Send every logger's messages to stderr: the package's own as the flags say, other libraries' from warnings up."""
    wanted = {
        "V": settings.log_verbose > 0,
        "I": settings.log_info,
        "W": settings.log_warning,
        "E": settings.log_error,
    }
    levels = {"V": logging.DEBUG, "I": logging.INFO, "W": logging.WARNING, "E": logging.ERROR}
    lowest = min((levels[letter] for letter, on in wanted.items() if on), default=logging.CRITICAL + 1)
    handler = logging.StreamHandler()
    handler.setFormatter(TritonFormatter())
    handler.addFilter(lambda record: wanted[severity(record.levelno)])
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    # It logs a traceback each time that a client's deadline meets the answer; what is ours to know is logged by us.
    logging.getLogger("grpc._cython.cygrpc").setLevel(logging.CRITICAL)
    # The lowest level on the logger itself: a message that nobody wants then costs 0.1 us.
    logging.getLogger(PACKAGE).setLevel(lowest)


def log_table(logger: logging.Logger, header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """Log a table at INFO, drawn as Triton draws its tables, so that scripts find the same columns."""
    cells = [header, *([" ".join(cell.split()) for cell in row] for row in rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
    rule = "+" + "+".join("-" * (width + 2) for width in widths) + "+"
    drawn = [
        "|" + "|".join(f" {cell:<{width}} " for cell, width in zip(row, widths, strict=True)) + "|" for row in cells
    ]
    table = "\n".join([rule, drawn[0], rule, *drawn[1:], rule])
    logger.info("%s", table, extra={"raw": True}, stacklevel=2)
