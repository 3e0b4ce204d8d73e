"""The stop signals of a process of the server.

Standard library only, for any CPython from 3.10 on.
"""

import os
import signal
import threading


def ignore_stop_signals() -> None:
    """Let SIGTERM and SIGINT have no effect: they may be sent to all processes of the server, which first drains.

    Uses a handler instead of SIG_IGN, which programs that the model starts would inherit. In processes that the model
    forks the signals have their default action from the beginning. A Python handler would run only between two
    instructions: after a signal just before a blocking call (such as for a queue's semaphore) such a process would
    stay blocked, and with it the process that joins it.
    """
    stops = (signal.SIGTERM, signal.SIGINT)
    masks: dict[int, set[int]] = {}

    def on_signal(_number: int, _frame: object) -> None:
        """No effect."""

    def before() -> None:
        masks[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, stops)

    def in_child() -> None:
        for number in stops:
            if signal.getsignal(number) is on_signal:
                signal.signal(number, signal.SIG_DFL)
        after()

    def after() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop(threading.get_ident()))

    for number in stops:
        signal.signal(number, on_signal)
    os.register_at_fork(before=before, after_in_child=in_child, after_in_parent=after)
