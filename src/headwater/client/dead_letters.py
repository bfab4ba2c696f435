"""Dead letters behind a connection."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Unpack

import msgspec

from headwater.broker.dead_letters import (
    PAGE,
    Exported,
    LetterDocument,
    LetterFilter,
    LetterStatistics,
    Redriven,
    from_wire,
    imported_pages,
    make_query,
)
from headwater.broker.flow import Flow
from headwater.ports.records import DeadLetter
from headwater.protocol import wire

LETTERS_PER_CALL = 1_000

_letters = msgspec.json.Decoder(list[LetterDocument])
_letter = msgspec.json.Decoder(LetterDocument)
_statistics = msgspec.json.Decoder(LetterStatistics)
_redriven = msgspec.json.Decoder(Redriven)
_count = msgspec.json.Decoder(int)
_exported = msgspec.json.Decoder(Exported)


class RemoteDeadLetters:
    def __init__(self, ask: Callable[..., Flow[Any]]) -> None:
        self._ask = ask

    def find(self, after: int = 0, limit: int = 100, **given: Unpack[LetterFilter]) -> Flow[list[DeadLetter]]:
        """In pages that fit into an answer."""
        found: list[DeadLetter] = []
        while len(found) < limit:
            most = min(limit - len(found), LETTERS_PER_CALL)
            page = yield from self._ask("rpc.dead_letters", _params(given, after=after, limit=most), _letters.decode)
            found += [from_wire(letter) for letter in page]
            if not page:
                break
            after = found[-1].id
        return found

    def get(self, id: int) -> Flow[DeadLetter]:
        found = yield from self._ask("rpc.dead_letters.get", wire.LetterId(id), _letter.decode)
        return from_wire(found)

    def statistics(self, **given: Unpack[LetterFilter]) -> Flow[LetterStatistics]:
        return self._ask("rpc.dead_letters.stats", _params(given), _statistics.decode)

    def redrive(self, to_topic: str | None = None, **given: Unpack[LetterFilter]) -> Flow[Redriven]:
        return self._ask("rpc.dead_letters.redrive", _params(given, to_topic=to_topic), _redriven.decode, again=False)

    def purge(self, **given: Unpack[LetterFilter]) -> Flow[int]:
        return self._ask("rpc.dead_letters.purge", _params(given), _count.decode, again=False)

    def export(self, after: int = 0, limit: int = PAGE, **given: Unpack[LetterFilter]) -> Flow[Exported]:
        return self._ask("rpc.dead_letters.export", _params(given, after=after, limit=limit), _exported.decode)

    def import_(self, lines: Iterable[str]) -> Flow[int]:
        imported = 0
        for page in imported_pages(lines):
            asked = wire.ImportLetters(page.lines)
            imported += yield from self._ask("rpc.dead_letters.import", asked, _count.decode, again=False)
        return imported


def _params(given: LetterFilter, **more: Any) -> wire.Letters:
    make_query(given)  # complain here, as for a file
    chosen: dict[str, Any] = dict(given)
    if chosen.get("ids") is not None:
        chosen["ids"] = list(chosen["ids"])
    return wire.Letters(**chosen, **more)
