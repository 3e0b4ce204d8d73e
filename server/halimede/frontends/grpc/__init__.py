import os

# Without this, grpc writes lines in its own format past the server's log, one for each failed handshake, so any client
# could fill a disk. grpc reads it when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
