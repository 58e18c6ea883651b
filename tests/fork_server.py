"""A process that starts our programs by a fork, without the imports that each start would cost.

`serve` is the server: it imports a program's module when it is first asked for it, and forks for each start.
`ask` asks it for a start. As a command, `start` does so with its own input, output, environment and folder,
passes signals on to the program, and ends as the program ends; a bare Python runs it in some milliseconds.
The connection to the server stays open: when it closes, the program is killed.
"""

import contextlib
import functools
import gc
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path

NUMBER = 4
STREAMS = (0, 1, 2)


def serve(address: str) -> None:
    """Start programs until the input of this process ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.create_server(address, family=socket.AF_UNIX) as listener:
        print("ready", flush=True)
        while sys.stdin not in select.select([sys.stdin, listener], [], [])[0]:
            connection, _ = listener.accept()
            with connection:
                size, files, _, _ = socket.recv_fds(connection, NUMBER, len(STREAMS))
                request = json.loads(received(connection, int.from_bytes(size, "big")))
                module = main_module(request["module"])
                warm(request["module"], *request["arguments"][:1])
                # A collection in the program would write to the pages that it shares with this process.
                gc.freeze()
                if not os.fork():
                    listener.close()
                    keep(connection, module, request, files)
                for file in files:
                    os.close(file)


@functools.cache
def warm(module: str, *arguments: str) -> None:
    """Do once what each start of the program would do again, in this process (`tests/warm_programs.py`)."""
    import importlib

    importlib.import_module("tests.warm_programs").warm(module, arguments)


def main_module(name: str) -> str:
    """Import the module that `python -m name` runs, without its lines for `__main__`; its full name."""
    import importlib

    module = importlib.import_module(name)
    if not hasattr(module, "__path__"):
        return name
    importlib.import_module(f"{name}.__main__")
    return f"{name}.__main__"


def keep(connection: socket.socket, module: str, request: dict, files: list[int]) -> None:
    """Fork the program, tell its id and its end, and kill it if nobody waits for its end any more."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if not child:
        connection.close()
        become(module, request, files)
    for file in (*STREAMS, *files):
        os.close(file)
    with contextlib.suppress(OSError):
        connection.sendall(child.to_bytes(NUMBER, "big"))
    process = os.pidfd_open(child)
    if process not in select.select([process, connection], [], [])[0]:
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(OSError):
        connection.sendall(code.to_bytes(NUMBER, "big", signed=True))
    os._exit(0)


def become(module: str, request: dict, files: list[int]) -> None:
    """Be the program in this process: with its files, environment, folder and arguments, until its end."""
    import runpy

    for number, file in zip(STREAMS, files, strict=True):
        os.dup2(file, number)
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    # Made anew, because a stream remembers whether the file of the server can be rewound.
    encoding = os.environ.get("PYTHONIOENCODING", "utf-8")
    sys.stdout = open(1, "w", encoding=encoding, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, "utf-8", "backslashreplace", closefd=False)  # noqa: SIM115
    sys.argv = [module, *request["arguments"]]
    # A module that is there already would be named in a warning.
    del sys.modules[module]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit()


def ask(address: str, request: dict, files: tuple[int, ...]) -> tuple[socket.socket, int]:
    """Start a program; the connection that tells its exit code, and its process id.

    The request has the program's `module`, `arguments`, `environment` and `folder`; the files become its input,
    output and errors.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    body = json.dumps(request).encode()
    socket.send_fds(connection, [len(body).to_bytes(NUMBER, "big")], files)
    connection.sendall(body)
    return connection, int.from_bytes(received(connection, NUMBER), "big")


def exit_code(connection: socket.socket) -> int:
    """Wait for a program's end; its exit code, or the number of the signal that ended it, below zero."""
    return int.from_bytes(received(connection, NUMBER), "big", signed=True)


def received(connection: socket.socket, size: int) -> bytes:
    """Receive exactly so many bytes."""
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError("the fork server has ended")
        data += part
    return data


def start(address: str, module: str, *arguments: str) -> None:
    """Start the program with all that this process has, and end as it ends."""
    request = {
        "module": module,
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": str(Path.cwd()),
    }
    connection, program = ask(address, request, STREAMS)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: os.kill(program, number))
    code = exit_code(connection)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    {"serve": serve, "start": start}[sys.argv[1]](*sys.argv[2:])
