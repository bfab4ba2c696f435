"""An exclusive subscription is resumed only by a consumer that proves that no other has held it since."""

from typing import Any

import pytest
from resuming_client import Client, done

from headwater import Log, ManualClock
from headwater.broker.flow import run_blocking
from headwater.broker.subscribe import Resume
from headwater.errors import LeaseLostError, SubscriptionActiveError

pytestmark = pytest.mark.usefixtures("engine_here")

LEASE_MS = 15_000


def publish(log: Any, count: int) -> None:
    log.publish_many([("a", n) for n in range(1, count + 1)])


def received(client: Client) -> list[tuple[int, int]]:
    """All that is deliverable now, in the order it comes."""
    found = []
    while more := client.fetch():
        found += more
    return found


def test_after_another_holder_it_begins_anew(log: Log) -> None:
    publish(log, 2)
    client = Client(log)
    client.fetch()
    client.vanish()
    other = Client(log)
    other.vanish()
    assert (client.resume(), client.settled) == ([], [])
    assert client.fetch() == [(1, 2)], "as after any holder that vanished"
    client.ack(1)
    assert client.fetch() == [(2, 2)]


def test_a_live_holder_is_not_disturbed(log: Log) -> None:
    publish(log, 2)
    client = Client(log)
    client.fetch(1)
    client.vanish()
    other = Client(log)
    assert other.fetch(1) == [(1, 2)]
    with pytest.raises(SubscriptionActiveError):
        client.resume()
    other.ack(1)
    assert other.fetch() == [(2, 1)]


@pytest.mark.parametrize("owner", ["somebody", ""])
def test_without_the_right_proof_a_live_lease_holds(log: Log, owner: str) -> None:
    publish(log, 1)
    client = Client(log)
    client.fetch()
    with pytest.raises(SubscriptionActiveError):
        client.resume(proof=Resume(owner, [(1, 1)]))
    client.ack(1)


def test_an_answer_that_was_lost_does_not_lock_the_client_out(log: Log) -> None:
    publish(log, 2)
    client = Client(log)
    client.fetch()
    lost = Client.__new__(Client)
    lost.__dict__.update(client.__dict__)
    lost.resume()  # the server took it up again, but the client never heard of it
    assert client.resume() == [(1, 1), (2, 1)]
    client.ack(1, 2)


def test_a_takeover_gets_past_it_and_resumes_nothing(log: Log) -> None:
    publish(log, 1)
    client = Client(log)
    client.fetch()
    client.vanish()
    other = Client(log)
    assert client.resume(takeover=True) == []
    assert client.fetch() == [(1, 2)]
    with pytest.raises(LeaseLostError):
        other.fetch()


def test_after_a_seek_it_begins_anew(log: Log) -> None:
    publish(log, 2)
    client = Client(log)
    client.fetch()
    client.vanish()
    log.seek("s", 2)
    assert (client.resume(), client.settled) == ([], [])
    assert client.fetch() == [(2, 1)]


def test_of_a_subscription_that_is_gone(log: Log, mode: Any) -> None:
    publish(log, 2)
    client = Client(log, mode=mode)
    client.fetch()
    client.vanish()
    log.delete_subscription("s")
    assert (client.resume(), client.settled) == ([], [])
    assert client.fetch() == [(1, 1), (2, 1)]


def test_after_a_polite_close_too(log: Log, mode: Any) -> None:
    """A server that shuts down gives back what it can; the client goes on when it is there again."""
    publish(log, 3)
    client = Client(log, mode=mode)
    client.fetch(2)
    run_blocking(client.connection.close())
    assert client.resume() == [(1, 1), (2, 1)]
    assert client.fetch() == [(3, 1)]
    client.ack(1, 2, 3)


# --- when the process died that held it ---------------------------------------------------------------------------


def test_the_proof_lets_it_in_at_once(open_log: Any, mode: Any, clock: ManualClock) -> None:
    """The process closed nothing, and its lease is alive."""
    died, present = open_log(), open_log()
    publish(died, 4)
    client = Client(died, mode=mode)
    client.fetch(3)
    client.ack(2, answered=False)
    if mode == "exclusive":
        with pytest.raises(SubscriptionActiveError):
            Client(present)
    assert client.resume(present) == [(1, 1), (3, 1)]
    assert client.settled == [2]
    assert client.fetch() == [(4, 1)]
    client.ack(1, 3, 4)
    assert present.subscription("s").lag == 0


def test_what_never_arrived_from_there(open_log: Any) -> None:
    died, present = open_log(), open_log()
    publish(died, 3)
    client = Client(died, max_attempts=1)
    client.fetch(arriving=1)
    assert client.resume(present) == [(1, 1)]
    assert client.fetch() == [(2, 1), (3, 1)]


def test_twenty_processes_that_die(open_log: Any, mode: Any) -> None:
    log = open_log()
    publish(log, 2)
    client = Client(log, mode=mode, max_attempts=1)
    client.fetch()
    for _ in range(20):
        died = client.log
        assert client.resume(open_log()) == [(1, 1), (2, 1)]
        died.close()
    client.ack(1, 2)
    assert client.log.subscription("s").lag == 0


def test_one_that_was_only_frozen_is_refused(open_log: Any) -> None:
    frozen, present = open_log(), open_log()
    publish(frozen, 3)
    client = Client(frozen)
    client.fetch(2)
    old, old_deliveries = client.connection, list(client.in_flight.values())
    client.resume(present)
    with pytest.raises(LeaseLostError):
        done(old.ack(old_deliveries))
    with pytest.raises(LeaseLostError):
        run_blocking(old.take(1, 0.0))
    run_blocking(old.close())
    client.ack(1, 2)
    assert client.fetch() == [(3, 1)]


def test_a_lease_that_ran_out_is_still_the_clients_until_it_is_taken(log: Log, mode: Any, clock: ManualClock) -> None:
    publish(log, 2)
    client = Client(log, mode=mode)
    client.fetch()
    clock.advance(10 * LEASE_MS / 1000)
    assert client.resume() == [(1, 1), (2, 1)]
    client.ack(1, 2)
    assert log.subscription("s").lag == 0
