"""A transport that sends in batches instead of each message alone.

It weakens the port's promise, by choice: `publish` and `publish_many` return when a message is in this process's
buffer. It has arrived when `flush`, `publish_and_wait` or `close` returns. A crash (kill -9, a power cut) loses the
buffer. Every other loss is reported: what could not be sent stays in the buffer for the next try and `on_unsent` is
called, a full buffer refuses, `close` raises UnsentError, and at the interpreter's exit the buffer is sent or its ids
are logged. Where not even a crash may lose a message, feed the transport with a forwarder."""

from __future__ import annotations

import atexit
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from headwater.arguments import check_whole
from headwater.errors import (
    HeadwaterError,
    InvalidInputError,
    InvalidOptionError,
    TooLargeError,
    TransportFailedError,
    UnsentError,
)
from headwater.formats import Span, span_ms
from headwater.message import BATCH_MESSAGES_MAX, Message
from headwater.ports.clock import Clock
from headwater.ports.transport import Transport
from headwater.transports.base import HasMessage, WrappingTransport

logger = logging.getLogger("headwater")

SIZE_DEFAULT = 100
WAIT_S_DEFAULT = 5.0
BUFFERED_DEFAULT = 10_000
BUFFERED_MAX = 10_000_000
WAIT_S_MAX = 24 * 3600.0
LOGGED_IDS_MAX = 1_000

OnUnsent = Callable[[Sequence[Message], Exception], None]


class BatchingTransport(WrappingTransport):
    """Sends when `size` messages are waiting, or the first has waited for `wait`; after a failure, `wait` later.

    `on_unsent(messages, error)` is called after each failed try, on the thread that tried. The messages are still in
    the buffer then, except one that the target refuses as such (InvalidInputError): it leaves the buffer, so that it
    does not hold up the rest, and the next `flush` or `close` raises UnsentError with it."""

    buffers = True

    def __init__(
        self,
        inner: Transport,
        *,
        clock: Clock,
        size: int = SIZE_DEFAULT,
        wait: Span = WAIT_S_DEFAULT,
        max_buffered: int = BUFFERED_DEFAULT,
        on_unsent: OnUnsent | None = None,
    ) -> None:
        super().__init__(inner)
        self._size = check_whole("size", size, 1, BATCH_MESSAGES_MAX)
        self._wait_ms = span_ms(wait, "wait")
        if not 1 <= self._wait_ms <= WAIT_S_MAX * 1000:
            raise InvalidOptionError(f"wait must be between a millisecond and a day, not {wait!r}", where=self.name)
        self._max_buffered = check_whole("max_buffered", max_buffered, self._size, BUFFERED_MAX)
        self._clock = clock
        self._on_unsent = on_unsent
        self._changed = threading.Condition()
        self._sending = threading.Lock()  # one batch at a time, so that their order stays; taken before `_changed`
        self._buffer: deque[tuple[Message, int]] = deque()  # with the time it was given
        self._refused: list[tuple[Message, InvalidInputError]] = []
        self._given = 0
        self._done = 0  # of those given, in their order: sent or refused
        self._alone = 0  # how many of the next go one by one, to find the one that the target refuses
        self._failed_ms: int | None = None
        self._last_error: Exception | None = None
        self._closing = False  # `_closed`: accepts no more
        self._ended = False
        clock.on_advance(self._look_again)
        # Each has its own, not one for all: last opened is first emptied, and so before its target closes.
        atexit.register(self._empty_at_exit)
        self._thread = threading.Thread(target=self._run, name=f"batches for {self.name}", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> int:
        """How many are in the buffer."""
        return len(self._buffer)

    def _publish(self, messages: Sequence[Message]) -> None:
        """Puts them into the buffer, all or none. Raises TransportFailedError if it is full: the target has been away,
        or is slower than the publishers."""
        self._put(messages)

    def publish_and_wait(self, message: Message | HasMessage) -> None:
        """Returns when the message has arrived, with all that were given before it; raises if it did not. After a
        failure it still is in the buffer, unless the target refused it as such."""
        given = self._message_of(message)
        self._send_up_to(self._put([given]))
        with self._changed:
            for at, (refused, error) in enumerate(self._refused):
                if refused is given:
                    del self._refused[at]
                    raise error

    def flush(self) -> None:
        """Sends all that was given until now. Raises the target's error, or UnsentError with what it refuses for
        good."""
        self._send_up_to(self._given)
        with self._changed:
            refused, self._refused = self._refused, []
        if refused:
            raise self._unsent([message for message, _ in refused], refused[0][1])

    def close(self) -> None:
        """Sends the buffer; raises UnsentError with what could not be sent. May be repeated if it was interrupted."""
        with self._changed:
            if self._ended or self._closing:
                return
            self._closed = self._closing = True
            self._changed.notify_all()
        try:
            self._empty_and_end()
        finally:
            self._closing = False

    def _empty_and_end(self) -> None:
        if self._thread is not threading.current_thread():  # on_unsent may call close
            self._thread.join()
        failure: Exception | None = None
        try:
            self._send_up_to(self._given)
        except Exception as exc:
            failure = exc
        atexit.unregister(self._empty_at_exit)
        self._ended = True
        left = [message for message, _ in (*self._refused, *self._buffer)]
        if self._refused:
            failure = failure or self._refused[0][1]
        try:
            self.inner.close()
        except UnsentError as exc:
            left += [message for message in exc.messages if isinstance(message, Message)]
            failure = failure or exc
        finally:
            if left:
                raise self._unsent(left, failure)

    # --- the buffer ---------------------------------------------------------------------------------------------

    def _put(self, messages: Sequence[Message]) -> int:
        with self._changed:
            self._check_open()
            if len(messages) > self._max_buffered:
                raise TooLargeError(
                    f"{len(messages)} messages at once, the buffer takes {self._max_buffered}",
                    where=self.name,
                    next="Publish it in parts, or raise max_buffered",
                )
            held = len(self._buffer) + len(self._refused)
            if held + len(messages) > self._max_buffered:
                reason = f": {_why(self._last_error)}" if self._last_error else ""
                raise TransportFailedError(
                    f"the buffer holds {held} of {self._max_buffered} messages{reason}",
                    where=self.name,
                    next="Publish again later; flush() raises the error of the target",
                ) from self._last_error
            now_ms = self._clock.now_ms()
            self._buffer.extend((message, now_ms) for message in messages)
            self._given += len(messages)
            self._changed.notify_all()
            return self._given

    def _send_up_to(self, number: int) -> None:
        """Returns when everything up to the given number has been sent, by any thread."""
        while self._done < number:
            self._send_batch()

    def _send_batch(self) -> None:
        with self._sending:
            with self._changed:
                count = 1 if self._alone else self._size
                batch = [message for message, _ in itertools.islice(self._buffer, count)]
            if not batch:
                return
            error = self._try(batch)
        if error is not None:
            self._report(batch, error)
            if not isinstance(error, InvalidInputError):
                raise error

    def _try(self, batch: list[Message]) -> Exception | None:
        try:
            self.inner.publish_many(batch)
        except InvalidInputError as exc:
            with self._changed:
                if len(batch) > 1:
                    self._alone = len(batch)
                    return None
                self._refused.append((batch[0], exc))
                self._forget(1)
            return exc
        except Exception as exc:
            with self._changed:
                self._last_error, self._failed_ms = exc, self._clock.now_ms()
            return exc
        with self._changed:
            self._last_error = self._failed_ms = None
            self._forget(len(batch))
        return None

    def _forget(self, count: int) -> None:
        for _ in range(count):
            self._buffer.popleft()
        self._done += count
        self._alone = max(0, self._alone - count)

    def _report(self, batch: list[Message], error: Exception) -> None:
        fate = "refused for good" if isinstance(error, InvalidInputError) else "kept for the next try"
        logger.warning("%s: %d message(s) not sent, %s: %s", self.name, len(batch), fate, error)
        if self._on_unsent is not None:
            try:
                self._on_unsent(batch, error)
            except Exception:
                logger.exception("%s: on_unsent failed", self.name)

    def _unsent(self, messages: list[Message], failure: Exception | None) -> UnsentError:
        unsent = UnsentError(
            f"{len(messages)} message(s) did not get out: {_why(failure)}",
            where=self.name,
            next="They are in `messages` of this error",
            messages=messages,
        )
        unsent.__cause__ = failure
        return unsent

    # --- when to send -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._wait_until_due():
            try:
                self._send_batch()
            except Exception:
                continue  # reported already

    def _wait_until_due(self) -> bool:
        """Wait until a batch is due. Returns False if it was closed."""
        with self._changed:
            while not self._closed and (left_ms := self._left_ms()) != 0:
                self._changed.wait(None if left_ms is None else left_ms / 1000)
            return not self._closed

    def _left_ms(self) -> int | None:
        """How long until the next batch is to be sent; None while there is nothing to wait for."""
        if not self._buffer:
            return None
        if self._failed_ms is None and (self._alone or len(self._buffer) >= self._size):
            return 0
        since_ms = self._buffer[0][1] if self._failed_ms is None else self._failed_ms
        waited_ms = self._clock.now_ms() - since_ms
        # In the future: the clock was set back. Better too early than hours late.
        return self._wait_ms - waited_ms if 0 <= waited_ms < self._wait_ms else 0

    def _look_again(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _empty_at_exit(self) -> None:
        try:
            self.close()
        except UnsentError as exc:
            ids = [message.id for message in exc.messages[:LOGGED_IDS_MAX] if isinstance(message, Message)]
            logger.critical("%s: lost at exit, because it was not closed: %s; ids: %s", self.name, exc.why, ids)
        except Exception:
            logger.exception("%s: failed at exit", self.name)


def _why(error: Exception | None) -> str:
    return error.why if isinstance(error, HeadwaterError) else f"{type(error).__name__}: {error}"
