"""Run a command in a network whose name server never answers: `unshare --net --mount python silent_names.py COMMAND...`."""

import fcntl
import socket
import struct
import subprocess
import sys
import tempfile

SIOCSIFFLAGS, IFF_UP = 0x8914, 0x1
RESOLV_CONF = "nameserver 127.0.0.1\nsearch ns.svc.cluster.local svc.cluster.local\noptions ndots:5\n"
"""As in a pod."""

if __name__ == "__main__":
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server, tempfile.NamedTemporaryFile("w") as file:
        fcntl.ioctl(server, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))
        server.bind(("127.0.0.1", 53))
        file.write(RESOLV_CONF)
        file.flush()
        subprocess.run(["mount", "--bind", file.name, "/etc/resolv.conf"], check=True)
        sys.exit(subprocess.run(sys.argv[1:], check=False).returncode)
