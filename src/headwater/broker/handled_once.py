"""A handler's dedupe queue, asked as flows: whether this message is its to handle, and what became of it."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from headwater.broker.flow import Blocking, Flow, Ticket, Within
from headwater.broker.logger import logger
from headwater.errors import HeadwaterError, StoreError
from headwater.ports.dedupe import DEDUPE_ID_CHARS_MAX, Begun, DedupeQueue

BUSY_S = 0.2
RETRY_S = 1.0
EXTENDS_PER_CLAIM = 3
THREADS_MAX = 4  # for event loops; a blocking worker asks on its own thread


class HandledOnce:
    """Ids are scoped ones: a handler may have many topics.

    Waiting for another's claim happens here and not by nacks: each of those would count as an attempt, and a few
    of them as a dead letter. While a message is being handled its claim is extended, as its lease is."""

    def __init__(self, queue: DedupeQueue, handler: str, claim_ms: int) -> None:
        self._queue = queue
        self._handler = handler
        self._claim_ms = claim_ms
        self._pool = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix=f"headwater-dedupe-{handler}")
        self._at_work: dict[str, None] = {}
        self._keeper: threading.Thread | None = None
        self._lock = threading.Lock()
        self._never = threading.Event()

    def begin(self, id: str, goes_on: Callable[[], bool], stopped: Ticket[None]) -> Flow[Begun]:
        """First or done; busy only if it should no longer wait. A queue that cannot be asked is asked again, since the
        alternative is to handle twice what was to be handled once."""
        while True:
            answer: Begun = "busy"
            pause_s = BUSY_S
            try:
                answer = yield Blocking(partial(self._begin, key_of(id)), self._pool)
            except StoreError as exc:
                logger.warning("handler %s waits for its dedupe queue: %s", self._handler, exc)
                pause_s = RETRY_S
            if answer != "busy" or not goes_on():
                return answer
            yield Within(stopped, pause_s)

    def _begin(self, key: str) -> Begun:
        answer = self._queue.begin(self._handler, key, self._queue.clock.now_ms(), self._claim_ms)
        if answer == "first":
            with self._lock:
                self._at_work[key] = None
                if self._keeper is None:
                    name = f"headwater-dedupe-{self._handler}-keeper"
                    self._keeper = threading.Thread(target=self._keep, name=name, daemon=True)
                    self._keeper.start()
        return answer

    def finish(self, id: str) -> Flow[None]:
        """Before the ack, so that a crash between the two costs no second handling."""
        try:
            yield Blocking(partial(self._queue.finish, self._handler, key_of(id)), self._pool)
        except StoreError as exc:
            logger.warning("handler %s could not note that %s is done: %s", self._handler, id, exc)

    def release(self, id: str) -> Flow[None]:
        try:
            yield Blocking(partial(self._queue.release, self._handler, key_of(id)), self._pool)
        except StoreError as exc:  # its claim runs out by itself
            logger.warning("handler %s could not release %s: %s", self._handler, id, exc)

    def ended(self, id: str) -> None:
        """However it ended: its claim is extended no longer."""
        with self._lock:
            self._at_work.pop(key_of(id), None)

    def _keep(self) -> None:
        """For as long as something is being handled, and a little longer, not to begin anew with each message."""
        while True:
            self._never.wait(self._claim_ms / 1000 / EXTENDS_PER_CLAIM)
            with self._lock:
                at_work = list(self._at_work)
                if not at_work:
                    self._keeper = None
                    return
            for key in at_work:
                try:
                    self._queue.extend(self._handler, key, self._queue.clock.now_ms(), self._claim_ms)
                except HeadwaterError as exc:
                    logger.warning("handler %s could not extend its claim of %s: %s", self._handler, key, exc)


def key_of(id: str) -> str:
    """What the queue knows a message by: its scoped id, or a digest of one that only plain SQL could have put there."""
    raw = id.encode(errors="surrogatepass")
    fits = 0 < len(id) <= DEDUPE_ID_CHARS_MAX and "\0" not in id and raw.decode(errors="replace") == id
    return id if fits else hashlib.sha256(raw).hexdigest()
