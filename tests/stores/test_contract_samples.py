"""What every store promises about figures over time."""

from headwater import ManualClock
from headwater.broker.engine import Engine
from headwater.broker.flow import run_blocking
from headwater.broker.history import take_sample
from headwater.delivery.publishing import DedupeWindow
from headwater.ports.records import Sample, SubscriptionSample
from headwater.ports.store import Store


def sample(at_ms: int, last_seq: int = 1) -> Sample:
    return Sample(
        at_ms, last_seq, 2**40, 3, 4, {"a": SubscriptionSample(5, 6), "ü 'quoted' \"": SubscriptionSample(7, 8)}
    )


def found(store: Store, step_ms: int, since_ms: int = 0) -> list[Sample]:
    with store.read() as reader:
        return reader.samples(step_ms, since_ms)


def test_none_yet(store: Store) -> None:
    assert found(store, 60) == []


def test_they_come_back_in_the_order_of_their_time(store: Store) -> None:
    with store.write() as writer:
        for slot, at_ms in ((1, 300), (2, 100), (3, 200)):
            writer.save_sample(60, slot, sample(at_ms))
        writer.save_sample(900, 1, sample(100))
        assert len(writer.samples(60)) == 3, "a writer sees what it has done"
    assert found(store, 60) == [sample(100), sample(200), sample(300)]
    assert found(store, 60, 200) == [sample(200), sample(300)]
    assert found(store, 60, 301) == []
    assert found(store, 900) == [sample(100)]


def test_a_slot_holds_the_last_one(store: Store) -> None:
    for at_ms in (100, 200):
        with store.write() as writer:
            writer.save_sample(60, 7, sample(at_ms, last_seq=at_ms))
    assert found(store, 60) == [sample(200, last_seq=200)]


def test_the_log_takes_room(store: Store) -> None:
    with store.read() as reader:
        assert reader.file_bytes() > 10_000  # in a database that tests share, more than they have left in it


def test_a_sample_is_taken_in_one_read_and_one_write(store: Store) -> None:
    """In memory they take turns: one inside the other would wait for itself."""
    engine = Engine(store, ManualClock(), dedupe=DedupeWindow())
    run_blocking(take_sample(engine))
    [taken] = found(store, 60_000)
    assert taken.file_bytes > 0
    engine.close()
