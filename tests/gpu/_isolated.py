"""Calls in a child process with a CUDA context of its own.

A kernel that traps takes its process's context along: every later CUDA call there fails. Tests
whose kernels may trap run here, so that one of them is one failure.
"""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest
import torch

import mok  # noqa: F401  the child needs its ops

START_SECONDS = 60
_context = multiprocessing.get_context("spawn")


def serve(connection: Connection) -> None:
    """The child: answers each (function, arguments) with None or a traceback."""
    connection.send(None)
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            function(*arguments)
            connection.send(None)
        except Exception:
            connection.send(traceback.format_exc())


class Isolated:
    """One child at a time; it is replaced after a call that failed, hung or killed it.

    With MOK_TESTS_IN_PROCESS=1, for tools that watch one process, calls happen in this one.
    """

    def __init__(self) -> None:
        self._process = None
        self._connection = None

    def run(self, function: Callable, *arguments, seconds: float = 30) -> None:
        """Calls a module-level function; fails the test where it raises or takes too long."""
        if os.environ.get("MOK_TESTS_IN_PROCESS") == "1":
            function(*arguments)
            return
        if self._process is None:
            self._start()
        self._connection.send((function, arguments))
        error = self._answer(seconds)
        if error is not None:
            self.close()
            pytest.fail(error, pytrace=False)

    def _start(self) -> None:
        self._connection, theirs = _context.Pipe()
        self._process = _context.Process(target=serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        error = self._answer(START_SECONDS)
        if error is not None:
            self.close()
            pytest.fail(f"no child process for CUDA tests: {error}", pytrace=False)

    def _answer(self, seconds: float) -> str | None:
        if not self._connection.poll(seconds):
            return f"no answer within {seconds} seconds"
        try:
            return self._connection.recv()
        except EOFError:
            self._process.join(5)
            return f"the child process died with exit code {self._process.exitcode}"

    def close(self) -> None:
        """Ends the child, whatever it is doing."""
        if self._process is None:
            return
        self._process.kill()
        self._process.join()
        self._connection.close()
        self._process = self._connection = None
