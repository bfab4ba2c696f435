"""Background work: the same thing again and again, on a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from headwater.broker.logger import logger
from headwater.errors import ReadOnly


class Repeating:
    """Calls `work` every `interval_s()` seconds. What it raises is logged; the thread lives on. That the log may not be
    written, which is so for a role that only reads, is logged once."""

    def __init__(self, name: str, work: Callable[[], object], interval_s: Callable[[], float]) -> None:
        self._work = work
        self._interval_s = interval_s
        self._stopping = False
        self._poked = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def poke(self) -> None:
        """The interval may have become shorter than the one that is being waited for."""
        self._poked.set()

    def stop(self) -> None:
        self._stopping = True
        self._poked.set()
        self._thread.join()

    def _run(self) -> None:
        last_s = time.monotonic()
        is_told = False
        while True:
            self._poked.wait(max(0.0, last_s + self._interval_s() - time.monotonic()))
            self._poked.clear()
            if self._stopping:
                return
            if time.monotonic() - last_s >= self._interval_s():
                last_s = time.monotonic()
                try:
                    self._work()
                except ReadOnly as exc:
                    if not is_told:
                        logger.info("background work cannot write, and is left to other processes: %s", exc)
                    is_told = True
                except Exception:
                    logger.exception("background work failed; it is tried again in %s s", self._interval_s())
