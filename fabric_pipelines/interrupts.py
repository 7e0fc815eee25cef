"""Ctrl-C in the `fabric` command: what the first one does, and what the second.

While nothing has begun (the program still loads) there is nothing to undo: one sentence, and out. Once a command
works, the first Ctrl-C unwinds it as a KeyboardInterrupt, so that it stops what it started and says what is kept;
one more means "now": one sentence, and out without unwinding. Either way the exit code is 130, and never a trace.
Only the start of the interpreter itself, some 20 ms, comes before us, so nothing slow is imported here.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

EXIT_CODE = 130
BEFORE = "interrupted before anything was done: run the same command again"
AFTER = "interrupted when all was done already"
AT_ONCE = (
    "stopped at once: all that was acknowledged is kept; "
    "run the same command again to go on where it stopped"
)
SHOW_CURSOR = b"\r\x1b[K\x1b[?25h"  # a progress bar hides it and is not unwound


class Interrupts:
    """The one owner of SIGINT in a `fabric` process."""

    def __init__(self) -> None:
        self._let_go: list[Callable[[], None]] = []
        self._sentence: str | None = BEFORE
        self._begun = self._asked = False

    def install(self) -> None:
        """Unless SIGINT is ignored, as under `nohup` or behind `&` in a script."""
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._interrupted)
            # The interpreter's end takes handlers away, and a signal would then decide the exit code. Registered
            # first, so called last.
            atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)

    def begin(self) -> None:
        """From here on a Ctrl-C is something that the command itself has to answer."""
        self._begun, self._sentence = True, AT_ONCE

    def told(self) -> None:
        """The user has read how it ended: whatever comes now adds no sentence."""
        self._asked, self._sentence = True, None

    def over(self) -> None:
        """The command has ended; only the interpreter still has to."""
        self._begun = False
        if self._sentence is not None:
            self._sentence = AFTER
        with contextlib.suppress(OSError):  # a reader that went away
            sys.stdout.flush()

    @contextlib.contextmanager
    def letting_go(self, let_go: Callable[[], None]) -> Iterator[None]:
        """While it lasts a second Ctrl-C calls `let_go`: whoever started something that outlives this process says
        how to end it without waiting."""
        self._let_go.append(let_go)
        try:
            yield
        finally:
            self._let_go.remove(let_go)

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if self._begun and not self._asked:
            self._asked = True
            raise KeyboardInterrupt
        for let_go in self._let_go:
            with contextlib.suppress(Exception):
                let_go()
        self.leave()

    def leave(self) -> NoReturn:
        """Out, without unwinding."""
        said = b"" if self._sentence is None else f"{self._sentence}\n".encode()
        try:
            # straight to the descriptor: the stream may be in the middle of a write
            os.write(2, (SHOW_CURSOR if os.isatty(2) else b"") + said)
        finally:
            os._exit(EXIT_CODE)


CTRL_C = Interrupts()
