"""The main function of a worker process: starts the model's runner, executes batches, answers, stops.

Everything runs on the main thread, as models expect: signals, asyncio and CUDA work best there.
Standard library and numpy only, for any CPython from 3.10 on.
"""

import asyncio
import gc
import json
import os
from importlib import import_module

from halimede.backends.hosting import Runner, WorkerSpec
from halimede.channel.frames import ChannelFrame
from halimede.channel.json_frames import error_json, json_frame
from halimede.channel.process_end.channel import Channel
from halimede.channel.process_end.memory import Memory
from halimede.channel.process_end.reader import ServerGoneError
from halimede.channel.process_end.stop_signals import ignore_stop_signals
from halimede.core.restarts import is_fault_of_machine
from halimede.core.spin import SpinPolicy
from halimede.core.types import InferenceError
from halimede.processes.blas import set_blas_threads
from halimede.workers.claim import DESCRIPTORS, Claim
from halimede.workers.frames.kinds import WORKER_FRAMES
from halimede.workers.host.batches import BatchRunner
from halimede.workers.host.worker_host import WorkerHost


def main(descriptor: int) -> int:
    """Serve the channel until the server ends it. Returns the process's exit code."""
    ignore_stop_signals()
    channel = Channel(descriptor, WORKER_FRAMES)
    memory = Memory(channel)
    # A process that the model forks must not use the channel, nor keep it open after the worker's end.
    os.register_at_fork(after_in_child=channel.disconnect)
    try:
        return _work(channel, memory)
    except ServerGoneError:
        return 0


def _work(channel: Channel, memory: "Memory") -> int:
    kind, body = channel.receive()
    if kind is not ChannelFrame.START:
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
            channel.send(json_frame(ChannelFrame.STARTED, {}))
            return 0
        if start["work"] == "complete_config":
            completed = import_module(module).complete_config(spec, host)
            channel.send(json_frame(ChannelFrame.STARTED, completed))
            return 0
        runner: Runner = getattr(import_module(module), function)(spec, host)
    except InferenceError as error:
        failed = {**error_json(error), "is_fault_of_machine": is_fault_of_machine(error)}
        channel.send(json_frame(ChannelFrame.FAILED, failed))
        return 1
    # Objects of the start live as long as the process: the collector need not traverse them.
    gc.freeze()
    started = {"is_async": runner.is_async, "answers_is_ready": runner.answers_is_ready}
    channel.send(json_frame(ChannelFrame.STARTED, started))
    spin = SpinPolicy(start["spins"], len(os.sched_getaffinity(0)))
    serving = BatchRunner(channel, memory, host, runner, spec, start["outputs"], spin, Claim(descriptors))
    if runner.is_async:
        asyncio.run(serving.run_on_loop())
    else:
        serving.run()
    return 0
