"""How slow a client may be. Pure; times in seconds.

There are few slots for pushes and pulls, and none is kept by silence or by bytes that drip. Waiting for a client uses
our patience with it up, and every byte that moves, either way, gives some of it back: at less than `BYTES_A_SECOND_MIN`
in the long run it comes to an end. Pauses are nothing bad in themselves: a client reads its whole database before it
has something to say, and the buffers of a thin line take and give much at a time. While our own side works, no time
passes here.
"""

from __future__ import annotations

BYTES_A_SECOND_MIN = 4_000  # on the line
READ_BYTES_A_SECOND_MIN = 20_000_000  # of a database, by a client that says nothing meanwhile


def patience_s(idle_s: float, size: int) -> float:
    """With a client that may have to read a database of so many bytes before it says something."""
    return idle_s + size / READ_BYTES_A_SECOND_MIN


class Pace:
    def __init__(self, now_s: float, patience_s: float) -> None:
        self._patience_s = self._left_s = patience_s
        self._since_s = now_s
        self._waits = 0

    def wait(self, now_s: float) -> None:
        """From now on we wait for the client. There may be two waits at a time, for its words and for it to read."""
        if not self._waits:
            self._since_s = now_s
        self._waits += 1

    def waited(self, now_s: float) -> None:
        self._charge(now_s)
        self._waits -= 1

    def worked(self, now_s: float) -> None:
        """Our side has something to say: until now it was at work, and the client had nothing to answer."""
        self._since_s = now_s

    def moved(self, size: int, now_s: float) -> None:
        self._charge(now_s)
        self._left_s = min(self._patience_s, self._left_s + size / BYTES_A_SECOND_MIN)

    def left_s(self, now_s: float) -> float:
        """Of our patience, if nothing moves from now on."""
        self._charge(now_s)
        return self._left_s

    def _charge(self, now_s: float) -> None:
        if self._waits:
            self._left_s -= now_s - self._since_s
        self._since_s = now_s
