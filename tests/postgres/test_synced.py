"""What is committed with an fsync, and what a power cut may undo: claims and extensions, and nothing else.

A deferred trigger notes the setting that the commit itself goes by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import psycopg
import pytest

import headwater
from headwater import Log, ManualClock

WATCHED = ("messages", "subscriptions", "deliveries", "dead_letters")
NOTING = """
CREATE TABLE noted (setting text);
CREATE FUNCTION note_setting() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    INSERT INTO public.noted VALUES (current_setting('synchronous_commit'));
    RETURN NULL;
END $$;
"""


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def log(postgres_url: str, clock: ManualClock) -> Iterator[Log]:
    with headwater.open(postgres_url, clock=clock, heartbeats=False, maintenance_interval=None) as opened:
        opened.publish_many([("a", number) for number in range(10)])
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute(NOTING)
            for table in WATCHED:
                connection.execute(
                    f"CREATE CONSTRAINT TRIGGER noting AFTER INSERT OR UPDATE OR DELETE ON headwater.{table}"
                    " DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION public.note_setting()"
                )
        yield opened


@pytest.fixture
def settings_of(postgres_url: str) -> Iterator[Callable[[Callable[[], object]], set[str]]]:
    """The settings of the commits in which something is written."""
    with psycopg.connect(postgres_url, autocommit=True) as connection:

        def ask(action: Callable[[], object]) -> set[str]:
            connection.execute("TRUNCATE noted")
            action()
            return {setting for (setting,) in connection.execute("SELECT DISTINCT setting FROM noted")}

        yield ask


Asked = Callable[[Callable[[], object]], set[str]]


@pytest.mark.parametrize("mode", ["exclusive", "shared"])
def test_only_claims_go_without_an_fsync(log: Log, clock: ManualClock, settings_of: Asked, mode: str) -> None:
    options = {"mode": mode, "lease": 1_000.0, "ack_wait": 30.0}
    assert settings_of(lambda: log.publish("a", 11)) == {"on"}
    assert settings_of(lambda: log.publish_many([("a", 12), ("a", 13)])) == {"on"}
    subscription = log.subscribe("s", "a", **options)  # type: ignore[arg-type]
    for _ in range(3):  # a subscription that is known to be unchanged is no exception
        messages = []
        assert settings_of(lambda: messages.extend(subscription.fetch(2))) == {"off"}  # noqa: B023
        first, second = messages
        assert settings_of(first.ack) == {"on"}
        assert settings_of(lambda: subscription.ack_many([second])) == {"on"}  # noqa: B023
    (message,) = subscription.fetch(1)
    assert settings_of(message.extend) == {"off"}
    assert settings_of(lambda: message.nack(delay=5.0)) == {"on"}
    (message,) = subscription.fetch(1)
    assert settings_of(lambda: message.reject("no use")) == {"on"}
    subscription.fetch(1)
    assert settings_of(subscription.close) == {"on"}
    assert settings_of(lambda: log.subscribe("s", "a", **options)) == {"on"}  # type: ignore[arg-type]


def test_a_change_of_holder_is_synced(log: Log, clock: ManualClock, settings_of: Asked, postgres_url: str) -> None:
    log.subscribe("s", "a", lease=10).fetch(1)
    clock.advance(10.001)
    with headwater.open(postgres_url, clock=clock, heartbeats=False, maintenance_interval=None) as other:
        assert settings_of(lambda: other.subscribe("s", "a", lease=10)) == {"on"}


def test_a_claim_that_shares_its_commit_with_an_ack_is_synced(log: Log, settings_of: Asked) -> None:
    with log.subscribe("s", "a", mode="shared") as one, log.subscribe("t", "a", mode="shared") as two:
        (message,) = one.fetch(1)
        two.fetch(1)

        def together() -> None:
            engine = log._core.engine  # type: ignore[attr-defined]
            with engine.store._turn:  # so that both become one group
                acking = one._consumer.submit_ack([message._claimed])
                claiming = two._consumer._claim_at_once
                claim = partial(claiming, 1)
                claimed = engine.committer.submit(claim, touching="t", synced=False)
            acking.wait(30)
            claimed.wait(30)
            assert acking.error is claimed.error is None

        assert settings_of(together) == {"on"}


def test_a_relaxed_log_syncs_nothing(postgres_url: str, log: Log, settings_of: Asked) -> None:
    with headwater.open(postgres_url, durability="relaxed") as relaxed:
        assert settings_of(lambda: relaxed.publish("a", 1)) == {"off"}
