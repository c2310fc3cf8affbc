"""Stands in for a program: asks the process of ``forks.py`` for a fork that runs it, and ends as that does."""

import json
import os
import signal
import socket
import sys

asking = socket.socket(socket.AF_UNIX)
asking.connect(SOCKET)  # noqa: F821  # filled in where this is copied to
asked = {"arguments": sys.argv, "variables": dict(os.environ), "directory": os.getcwd(), "files": [0, 1, 2]}
text = json.dumps(asked | {"session": True, "parent": None, "network": None}).encode()
asking.sendall(len(text).to_bytes(4, "big"))
socket.send_fds(asking, [text[:1]], [0, 1, 2])
asking.sendall(text[1:])
process = int.from_bytes(asking.recv(4, socket.MSG_WAITALL), "big")
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: os.kill(process, number))
code = int.from_bytes(asking.recv(4, socket.MSG_WAITALL) or b"\1", "big", signed=True)
sys.exit(code if code >= 0 else 128 - code)
