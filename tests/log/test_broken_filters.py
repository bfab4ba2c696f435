"""A stored filter that RE2 cannot take, from before: the error names its subscription, and nothing else fails."""

from __future__ import annotations

from pathlib import Path

import apsw
import pytest

import headwater
from headwater.errors import InvalidFilterError, SubscriptionMismatchError

BROKEN = '{"from":"/^(?!test)/"}'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A log with two subscriptions that have seen half of it; the filter of one was written by an earlier version."""
    path = tmp_path / "log.db"
    with headwater.open(path, maintenance_interval=None) as log:
        log.publish_many([("a", n, {"from_": "bob"}) for n in range(4)])
        for id, from_ in (("good", "bob"), ("old", "/^b/")):
            with log.subscribe(id, "a", from_=from_) as subscription:
                subscription.ack_many(subscription.fetch(2))
    connection = apsw.Connection(str(path))
    connection.execute(
        "UPDATE subscriptions SET spec = json_set(spec, '$.entities', json(?)) WHERE id = 'old'", (BROKEN,)
    )
    connection.close()
    return path


def test_it_is_shown_as_broken_and_others_are_well(path: Path) -> None:
    with headwater.open(path, maintenance_interval=None) as log:
        good, old = log.subscriptions()
        assert (good.problem, good.lag) == (None, 2)
        assert old.problem is not None
        assert "'old' is broken" in old.problem
        assert "(?!" in old.problem
        assert len(log.statistics().subscriptions) == 2
        with log.subscribe("good", "a", from_="bob") as subscription:
            assert len(subscription.fetch()) == 2


def test_its_use_raises_an_error_with_its_name(path: Path) -> None:
    with (
        headwater.open(path, maintenance_interval=None) as log,
        pytest.raises(InvalidFilterError, match=r"subscription old, .*\(\?!"),
    ):
        log.subscribe("old", "a", from_="/^(?!test)/")


def test_another_filter_takes_its_place(path: Path) -> None:
    with headwater.open(path, maintenance_interval=None) as log:
        with log.subscribe("old", "a", from_="/^[^t]/") as subscription:
            assert [message.data for message in subscription.fetch()] == [2, 3], "it goes on where it was"
        assert log.subscriptions()[1].problem is None
        with pytest.raises(SubscriptionMismatchError):
            log.subscribe("old", "a", from_="/^b/")


def test_retention_counts_what_it_takes_from_it(path: Path) -> None:
    with headwater.open(path, maintenance_interval=None) as log:
        log.retain("a", max_count=0)
        assert log.run_maintenance().pruned == {"a": 4}
        assert [info.gaps for info in log.subscriptions()] == [2, 2]


def test_it_can_be_removed(path: Path) -> None:
    with headwater.open(path, maintenance_interval=None) as log:
        log.delete_subscription("old")
        assert [info.id for info in log.subscriptions()] == ["good"]
