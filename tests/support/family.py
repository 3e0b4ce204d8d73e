"""A worker that starts processes of several kinds."""

FAMILY = """
import os, subprocess, sys, time

def sleeper(*way):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], **dict(way))
    return process.pid

def daemon():
    # Forked twice, so that it is reparented and leads no session: nothing identifies the worker that started it.
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(write, str(os.getpid()).encode())
            for descriptor in (0, 1, 2, write):
                os.close(descriptor)
            while True:
                time.sleep(600)
        os._exit(0)
    os.wait()
    return int(os.read(read, 20))

answer = [sleeper(), sleeper(("start_new_session", True)), daemon()]
"""
"""Python for a worker: starts a child, a grandchild in a session of its own and a daemon, and answers with their pids."""
