"""The main function of a worker process: starts the model's runner, executes batches, answers, stops.

Everything runs on the main thread, as models expect: signals, asyncio and CUDA work best there.
Standard library and numpy only, for any CPython from 3.10 on.
"""

import asyncio
import gc
import json
import os
import signal
import threading
from importlib import import_module

from halimede.backends.hosting import Runner, WorkerSpec
from halimede.core.spin import SpinPolicy
from halimede.core.supervise import is_fault_of_machine
from halimede.core.types import InferenceError
from halimede.workers.child.batches import BatchRunner
from halimede.workers.child.blas import set_blas_threads
from halimede.workers.child.channel import Channel
from halimede.workers.child.host import WorkerHost
from halimede.workers.child.memory import Memory
from halimede.workers.child.reader import ServerGoneError
from halimede.workers.claim import DESCRIPTORS, Claim
from halimede.workers.frames.json_frames import error_json, json_frame
from halimede.workers.frames.kinds import (
    FrameKind,
)


def main(descriptor: int) -> int:
    """Serve the channel until the server ends it. Returns the process's exit code."""
    ignore_stop_signals()
    channel = Channel(descriptor)
    memory = Memory(channel)
    # A process that the model forks must not use the channel, nor keep it open after the worker's end.
    os.register_at_fork(after_in_child=channel.disconnect)
    try:
        return _work(channel, memory)
    except ServerGoneError:
        return 0


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


def _work(channel: Channel, memory: "Memory") -> int:
    kind, body = channel.receive()
    if kind is not FrameKind.START:
        raise RuntimeError(f"the first frame is {kind.name}, not START")
    descriptors = [one for _ in range(DESCRIPTORS) if (one := channel.take_descriptor()) is not None]
    if len(descriptors) != DESCRIPTORS:
        raise RuntimeError("START came without its descriptors")
    start = json.loads(bytes(body))
    spec = WorkerSpec(**start["spec"])
    host = WorkerHost(channel, memory, spec, start["outputs"])
    set_blas_threads(spec.threads)
    module, _, function = spec.runner.partition(":")
    try:
        if start["work"] == "check_model":
            import_module(module).check_model(spec, host)
            channel.send(json_frame(FrameKind.STARTED, {}))
            return 0
        if start["work"] == "complete_config":
            completed = import_module(module).complete_config(spec, host)
            channel.send(json_frame(FrameKind.STARTED, completed))
            return 0
        runner: Runner = getattr(import_module(module), function)(spec, host)
    except InferenceError as error:
        failed = {**error_json(error), "is_fault_of_machine": is_fault_of_machine(error)}
        channel.send(json_frame(FrameKind.FAILED, failed))
        return 1
    # Objects of the start live as long as the process: the collector need not traverse them.
    gc.freeze()
    started = {"is_async": runner.is_async, "answers_is_ready": runner.answers_is_ready}
    channel.send(json_frame(FrameKind.STARTED, started))
    spin = SpinPolicy(start["spins"], len(os.sched_getaffinity(0)))
    serving = BatchRunner(channel, memory, host, runner, spec, start["outputs"], spin, Claim(descriptors))
    if runner.is_async:
        asyncio.run(serving.run_on_loop())
    else:
        serving.run()
    return 0
