import os

# grpc writes lines of its own form past the server's log, one for each handshake that fails: any client could fill a
# disk. It reads this when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
