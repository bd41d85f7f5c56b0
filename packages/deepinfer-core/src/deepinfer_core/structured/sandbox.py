"""`Sandbox`: a child process in which grammars are tried out, killed and replaced when one misbehaves.

The child compiles exactly what the engine would. A grammar that it got through in time, the engine gets through too;
one that it did not is refused, and the engine has not touched it.
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
from typing import IO, Any, Final, cast

from deepinfer_core.errors import GrammarError
from deepinfer_core.structured.limits import COMPILE_DEADLINE_S, STARTUP_DEADLINE_S
from deepinfer_core.structured.source import GrammarSource, GrammarText
from deepinfer_core.structured.vocabulary import Vocabulary

__all__ = ["Sandbox"]

# The import path goes along, so that the child finds the same packages whatever started this process.
_PROGRAM: Final = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from deepinfer_core.structured.child import main
main()
"""


class Sandbox:
    """Tries out grammars for one vocabulary, one at a time. Safe to use from several threads."""

    def __init__(self, vocabulary: Vocabulary, *, deadline_s: float = COMPILE_DEADLINE_S) -> None:
        self._vocabulary, self._deadline_s = vocabulary, deadline_s
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._closed = False

    @property
    def is_ready(self) -> bool:
        """Whether its child runs. Only a hint: it may end at any time."""
        child = self._child
        return child is not None and child.is_alive

    def convert(self, given: GrammarText) -> GrammarSource:
        """The converted grammar, once the child has compiled it. Raises GrammarError, also when it took too long."""
        with self._lock:
            child = self._running()
            child.send(json.dumps({"form": given.form, "text": given.text}))
            try:
                answer = child.receive(self._deadline_s)
            except TimeoutError as error:
                self._replace()
                raise GrammarError(
                    f"the grammar was not compiled within {self._deadline_s:g} s; make it smaller or less ambiguous"
                ) from error
            if answer is None:
                self._replace()
                raise GrammarError("the grammar made the compiler crash; make it smaller or flatter")
        found: dict[str, Any] = json.loads(answer)
        if "error" in found:
            raise GrammarError(found["error"])
        return GrammarSource(found["text"], tuple(found["enforced"]), tuple(found["ignored"]))

    def close(self) -> None:
        """End the child. The sandbox cannot be used afterwards."""
        with self._lock:
            self._closed = True
            self._end()

    def _running(self) -> _Child:
        if self._closed:
            raise GrammarError("the engine is closed; no grammar can be compiled any more")
        if self._child is None or not self._child.is_alive:
            self._end()
            self._child = _Child(self._vocabulary)
        return self._child

    def _replace(self) -> None:
        """End the child; the next one starts in the background, so that the next grammar need not wait for it."""
        self._end()
        threading.Thread(target=self._start_quietly, name="grammar-sandbox-start", daemon=True).start()

    def _start_quietly(self) -> None:
        with contextlib.suppress(GrammarError), self._lock:  # the next grammar tries again and reports it
            self._running()

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()


class _Child:
    """One process and the thread that reads its answers."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the engine, which then ends the child
            encoding="utf-8",
        )
        self._input = cast("IO[str]", self._process.stdin)
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        reader = threading.Thread(target=_read, args=(self._process.stdout, self._lines), daemon=True)
        reader.start()
        self.send(vocabulary.to_json())
        try:
            ready = self.receive(STARTUP_DEADLINE_S)
        except TimeoutError:
            ready = None
        if ready is None:
            self.kill()
            raise GrammarError(
                f"the compiler process did not start within {STARTUP_DEADLINE_S:g} s; check that llguidance is "
                "installed and that processes may be started"
            )

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def send(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # the child is gone: `receive` finds the end of its answers
            self._input.write(line + "\n")
            self._input.flush()

    def receive(self, timeout_s: float) -> str | None:
        """The next line; None when the child has ended. Raises TimeoutError."""
        try:
            return self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError from None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):  # text that was not sent yet
            self._input.close()


def _read(output: IO[str], lines: queue.SimpleQueue[str | None]) -> None:
    with output:
        for line in output:
            lines.put(line)
    lines.put(None)
