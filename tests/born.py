"""`python -S -E tests/born.py SOCKET MODULE …` is `python -m MODULE …`, in a fork of the nursery that listens there.

This process stands for the fork: it has its command line, environment, folder, output and session, hands it the signals that it gets, and
ends as it does. Where it is killed with kill -9, so is the fork. It imports next to nothing, and must not: it is there to cost nothing.
"""

import json
import os
import signal
import socket
import sys

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    with socket.socket(socket.AF_UNIX) as nursery:
        nursery.connect(sys.argv[1])
        wanted = {"argv": sys.argv[2:], "environment": dict(os.environ), "cwd": os.getcwd()}  # noqa: PTH109 - pathlib is an import more
        socket.send_fds(nursery, [b" "], [1, 2])
        nursery.sendall(json.dumps(wanted).encode() + b"\n")
        told = nursery.makefile()
        pid = int(told.readline())
        for number in SIGNALS:
            signal.signal(number, lambda number, _: os.kill(pid, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        status = int(told.readline())
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
