"""A process that has imported what engines need, and forks one off for each launch.

Started by the agent as `python -P -m workers.agent.template_process SOCKET_FD MODULE...`. To import
torch takes a second or two and 150 MB that no other process shares, for every replica anew. Forked off
this process a replica has all of it at once, and shares the memory until it writes to it.

On request it forks off another one like itself that reads what all replicas of one model read alike,
their tokenizer, and from then on forks those off: the memory of one model's replicas is shared further
than that of all.

Each has one thread and does nothing but import, read, fork and reap: it opens no device, computes next
to nothing and holds no secret. What it forks is a shim that forks the engine: the same two processes as
with a launch by program, looking the same from outside. It ends when the agent does; what it forked goes on.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import runpy
import signal
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from workers.agent import shim

LARGEST_MESSAGE_BYTES = 128 * 1024
ROOM_VARIABLE = "EXAOPS_TEMPLATE_ROOM"
ROOM_BYTES = 4096
"""Bytes of environment and of arguments to overwrite in a forked process, so that it shows its own."""


class ForkRequest(msgspec.Struct, frozen=True, tag="fork"):
    """One launch. Its log file comes along as a descriptor."""

    module: str
    arguments: tuple[str, ...]
    env: dict[str, str]
    shown_env: dict[str, str]
    """The part of `env` that others find the process by; nothing secret."""
    runtime_dir: str


class BranchRequest(msgspec.Struct, frozen=True, tag="branch"):
    """One more process like this one. Its end of a new channel comes along as a descriptor."""

    call: tuple[str, ...]
    """`module:function` and its arguments, called before it forks anything."""


class ForkAnswer(msgspec.Struct, frozen=True):
    """`pid` of the shim or branch, or why there is none. A channel's first one, with neither, says: ready."""

    pid: int = 0
    error: str = ""


_DECODER = msgspec.json.Decoder(ForkRequest | BranchRequest)
"""Made once: whatever a template writes to between two forks is shared by fewer of those it forks."""


def main(arguments: Sequence[str]) -> int:
    """Import, then fork on request until the agent closes its end. Returns 0."""
    channel = socket.socket(fileno=int(arguments[0]))
    channel.set_inheritable(False)
    for module in arguments[1:]:
        if not module.startswith("-"):
            importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return _serve(channel)


def _serve(channel: socket.socket) -> int:
    """Say that this process is ready, then do as asked until the agent closes its end. Returns 0."""
    # What exists now is never looked at by a collection again, so it stays shared with all that is forked.
    gc.collect()
    gc.freeze()
    _answer(channel, ForkAnswer())
    while True:
        message, descriptors, _flags, _address = socket.recv_fds(channel, LARGEST_MESSAGE_BYTES, 1)
        if not message:
            return 0
        request = _DECODER.decode(message)
        try:
            if isinstance(request, ForkRequest):
                _answer(channel, _fork_shim(channel, request, descriptors))
            else:
                _answer(channel, _fork_branch(channel, request, descriptors))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


def _answer(channel: socket.socket, answer: ForkAnswer) -> None:
    channel.sendall(msgspec.json.encode(answer))


def _fork_branch(channel: socket.socket, request: BranchRequest, descriptors: Sequence[int]) -> ForkAnswer:
    """Fork a process that makes the call and then serves the channel that came along."""
    (theirs,) = descriptors
    pid = os.fork()
    if pid == 0:
        channel.close()
        _be_branch(request, theirs)
    return ForkAnswer(pid=pid)


def _be_branch(request: BranchRequest, descriptor: int) -> NoReturn:
    """Prepare and serve; never returns. The log has what went wrong, the channel's end says that it did."""
    status = 1
    try:
        os.setsid()
        channel = socket.socket(fileno=descriptor)
        channel.set_inheritable(False)
        place, *arguments = request.call
        module, _, function = place.partition(":")
        getattr(importlib.import_module(module), function)(*arguments)
        threads = len(tuple(Path("/proc/self/task").iterdir()))
        if threads == 1:
            status = _serve(channel)
        else:
            # A fork has the calling thread only, and locks that others held stay shut in it.
            sys.stderr.write(f"{place} left {threads} threads, so nothing can be forked\n")
    except BaseException:  # noqa: BLE001 - the end of a process: there is nobody to raise it to
        traceback.print_exc()
    os._exit(status)


def _fork_shim(channel: socket.socket, request: ForkRequest, descriptors: Sequence[int]) -> ForkAnswer:
    """Fork and wait until the child is in its own session and can be found by its label."""
    (log,) = descriptors
    reader, writer = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        channel.close()
        os.close(reader)
        _be_shim(request, log, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        complaint = pipe.read().decode("utf-8", "replace")
    return ForkAnswer(error=complaint) if complaint else ForkAnswer(pid=pid)


def _be_shim(request: ForkRequest, log: int, writer: int) -> NoReturn:
    """Turn this fresh child into the shim of one attempt; never returns."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(request.runtime_dir)
        os.environ.clear()
        os.environ.update(request.env)
        _show(request.module, request.arguments, request.shown_env)
    except (OSError, ValueError) as error:
        os.write(writer, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    os.close(writer)
    try:
        status = shim.supervise(request.runtime_dir, lambda: _fork_engine(request, log))
    except BaseException:  # noqa: BLE001 - the end of a process: there is nobody to raise it to
        traceback.print_exc()
        status = 1
    os._exit(status)


def _fork_engine(request: ForkRequest, log: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.close(log)
    os._exit(_run(request))


def _run(request: ForkRequest) -> int:
    """Run the engine's module as Python would as the main program; return the exit status."""
    sys.argv = [request.module, *request.arguments]
    try:
        runpy.run_module(request.module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException:  # noqa: BLE001 - the end of a process: what Python itself would print
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _show(module: str, arguments: Sequence[str], env: Mapping[str, str]) -> None:
    """Overwrite what `/proc/<pid>/cmdline` and `environ` show, which a fork takes over from its parent.

    Raises `ValueError` if the environment does not fit; arguments are cut off.
    """
    # Fields 48 to 51 of proc(5): where arguments and environment begin and end in this process.
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    arg_start, arg_end, env_start, env_end = (int(field) for field in fields[45:49])
    environment = b"".join(f"{key}={value}\0".encode() for key, value in env.items())
    if len(environment) > env_end - env_start:
        raise ValueError(f"{len(environment)} bytes of labels do not fit into {env_end - env_start}")
    command = b"\0".join(part.encode() for part in (sys.executable, "-P", "-m", module, *arguments))
    _overwrite(env_start, env_end, environment)
    _overwrite(arg_start, arg_end, command[: arg_end - arg_start - 1] + b"\0")


def _overwrite(start: int, end: int, content: bytes) -> None:
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, content, len(content))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
