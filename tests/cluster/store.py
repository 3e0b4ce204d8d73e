"""The store's process: moto's S3 server at an address and a port."""

import sys
import threading

from moto.server import ThreadedMotoServer

if __name__ == "__main__":
    ThreadedMotoServer(sys.argv[1], int(sys.argv[2]), verbose=False).start()
    threading.Event().wait()
