"""The commands `plait` and `python` of a shell, forked from the server whose socket is PLAIT_WARM: see
`warm.py`."""

import json
import os
import signal
import socket
import struct
import sys

name, *words = sys.argv
if name.endswith("plait"):
    words[:0] = ["-m", "plait"]
while words[:1] == ["-u"]:  # of torchrun, for ranks; a forked process flushes at its end
    del words[0]
if not words or (words[0] not in ("-", "-m") and not words[0].endswith(".py")):
    os.execv(sys.executable, [sys.executable, *words])
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect(os.environ["PLAIT_WARM"])
    job = {"argv": words, "env": dict(os.environ), "leads": False, "targets": [0, 1, 2]}
    job["network"] = f"/proc/{os.getpid()}/ns/net"
    job["cwd"] = os.getcwd()  # noqa: PTH109
    socket.send_fds(server, [json.dumps(job).encode()], [0, 1, 2])
    [pid] = struct.unpack("i", server.recv(4))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    [status] = struct.unpack("i", server.recv(4))
code = os.waitstatus_to_exitcode(status)
sys.exit(code if code >= 0 else 128 - code)
