"""From staging files into the log: all of a batch in one transaction, or nothing."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.delivery.dedupe import DedupeWindow
from headwater.errors import Conflict
from headwater.pipeline.sink.guard import SinkKey, is_repeat, row_ids
from headwater.pipeline.sink.rows import drafts_of
from headwater.pipeline.sink.staging import Staged, staged_pieces
from headwater.pipeline.source.writing import changed
from headwater.ports.store import Store, Writer

_WINDOW = DedupeWindow()


def promote(store: Store, folder: str, staged: Sequence[Staged], key: SinkKey, batch: int, now_ms: int) -> bool:
    """Publish a batch of a sink once; False if it was published before. Rows in order, by partition."""

    def publish(writer: Writer) -> bool:
        stored = writer.sink_batch(key.sink)
        of_query = None if key.of_query is None else writer.sink_batch(key.of_query)
        if is_repeat(key, batch, stored, of_query):
            return False
        _append(writer, folder, staged, key.sink, batch, now_ms)
        if writer.sink_batch(key.sink) != stored:  # since the first message, nobody else can publish
            raise Conflict("somebody else publishes under this sinkId", where=f"sink {key.sink}, batch {batch}")
        writer.save_sink_batch(key.sink, batch, now_ms)
        if key.of_query is not None:
            writer.save_sink_batch(key.of_query, batch, now_ms)
        return True

    return changed(store, publish)


def promote_unguarded(store: Store, folder: str, staged: Sequence[Staged], job: str, now_ms: int) -> None:
    """The same for a job that runs once and has no batches."""
    changed(store, lambda writer: _append(writer, folder, staged, job, 0, now_ms))


def _append(writer: Writer, folder: str, staged: Sequence[Staged], sink: str, batch: int, now_ms: int) -> None:
    for partition, each in enumerate(staged):
        id_of_row, row = row_ids(sink, batch, partition), 0
        with staged_pieces(folder, each) as pieces:
            for piece in pieces:
                writer.append(drafts_of(piece, row, id_of_row), now_ms, _WINDOW)
                row += piece.num_rows
