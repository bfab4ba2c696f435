"""A client whose connection broke keeps its messages in flight: none of them is delivered again, and a broken
connection is no failed attempt."""

from typing import Any

import pytest
from full_disk import full_disk
from resuming_client import BREAKS, Break, Client, done

from headwater import Log, ManualClock
from headwater.broker.flow import run_blocking
from headwater.broker.subscribe import Resume
from headwater.errors import DiskFullError, LeaseLostError

pytestmark = pytest.mark.usefixtures("engine_here")

ACK_WAIT_MS = 30_000


@pytest.fixture(params=BREAKS)
def broken(request: pytest.FixtureRequest) -> Break:
    return BREAKS[request.param]


def publish(log: Any, count: int, **options: Any) -> None:
    log.publish_many([("a", n, options) for n in range(1, count + 1)])


# --- in flight ----------------------------------------------------------------------------------------------------


def test_what_is_in_flight_stays_the_clients_and_can_be_acked(log: Log, mode: Any, broken: Break) -> None:
    publish(log, 3)
    client = Client(log, mode=mode)
    client.fetch()
    broken(client)
    assert client.resume() == [(1, 1), (2, 1), (3, 1)]
    assert client.settled == []
    assert [claimed.message.topic for claimed in client.in_flight.values()] == ["a"] * 3, "with their data"
    assert client.fetch() == [], "it is not delivered again"
    client.ack(2)
    client.ack(1, 3)
    info = log.subscription("s")
    assert (info.lag, info.in_flight, info.waiting, info.acked, info.redelivered) == (0, 0, 0, 3, 0)


def test_every_verb_works_on_it(log: Log, mode: Any, broken: Break) -> None:
    publish(log, 4)
    client = Client(log, mode=mode, jitter=0)
    client.fetch()
    broken(client)
    client.resume()
    client.reject(1)
    client.nack(2)
    run_blocking(client.connection.extend([client.in_flight[3]], 60_000))
    client.ack(4)
    assert client.fetch() == [(2, 2)], "the nack counts, the broken connection does not"
    assert [letter.attempts for letter in log.dead_letters.list()] == [1]


def test_no_other_consumer_gets_it(log: Log, broken: Break, clock: ManualClock) -> None:
    publish(log, 2)
    client = Client(log, mode="shared", ack_wait=ACK_WAIT_MS / 1000)
    other = Client(log, mode="shared", ack_wait=ACK_WAIT_MS / 1000)
    client.fetch()
    clock.advance((ACK_WAIT_MS - 1) / 1000)
    broken(client)
    client.resume()
    clock.advance((ACK_WAIT_MS - 1) / 1000)
    assert other.fetch() == client.fetch() == [], "it has all its time again"
    clock.advance(0.001)
    assert other.fetch() == [(1, 2)], "and no more than that"


def test_its_time_begins_anew(log: Log, broken: Break, clock: ManualClock) -> None:
    publish(log, 1)
    client = Client(log, ack_wait=ACK_WAIT_MS / 1000)
    client.fetch()
    clock.advance((ACK_WAIT_MS - 1) / 1000)
    broken(client)
    client.resume()
    clock.advance((ACK_WAIT_MS - 1) / 1000)
    assert client.fetch() == []
    clock.advance(0.001)
    assert client.fetch() == [(1, 2)]


def test_a_retry_in_flight_keeps_its_attempt(log: Log, mode: Any, broken: Break) -> None:
    publish(log, 2)
    client = Client(log, mode=mode)
    client.fetch()
    client.nack(1)
    assert client.fetch() == [(1, 2)]
    broken(client)
    assert sorted(client.resume()) == [(1, 2), (2, 1)]
    client.ack(1, 2)
    assert log.subscription("s").lag == 0


def test_it_takes_up_room(log: Log, mode: Any, broken: Break) -> None:
    publish(log, 3)
    client = Client(log, mode=mode, max_in_flight=2)
    client.fetch()
    broken(client)
    client.resume()
    assert client.fetch() == [], "max_in_flight is reached"
    client.ack(1)
    assert client.fetch() == [(3, 1)]


def test_the_old_connection_has_nothing_to_say_any_more(log: Log, mode: Any) -> None:
    publish(log, 3)
    client = Client(log, mode=mode)
    client.fetch(2)
    old, old_deliveries = client.connection, list(client.in_flight.values())
    client.resume()
    with pytest.raises(LeaseLostError):
        done(old.ack(old_deliveries))
    run_blocking(old.close(vanished=True))
    assert client.fetch() == [(3, 1)], "what it closed late was not its own to give back"
    client.ack(1, 2, 3)
    assert log.subscription("s").lag == 0


@pytest.mark.parametrize("max_attempts", [1, 2])
def test_twenty_broken_connections_are_no_attempt(log: Log, mode: Any, broken: Break, max_attempts: int) -> None:
    publish(log, 3)
    client = Client(log, mode=mode, max_attempts=max_attempts)
    client.fetch(2)
    for _ in range(20):
        broken(client)
        assert client.resume() == [(1, 1), (2, 1)]
    assert client.fetch() == [(3, 1)]
    client.ack(1, 2, 3)
    assert log.dead_letters.list() == []


def test_a_resume_that_fails_may_be_tried_again(log: Log, mode: Any, broken: Break) -> None:
    publish(log, 2)
    client = Client(log, mode=mode)
    client.fetch(arriving=1)
    broken(client)
    with full_disk(log), pytest.raises(DiskFullError):
        client.resume()
    assert client.resume() == [(1, 1)]


def test_a_resume_whose_answer_was_lost_may_be_tried_again(log: Log) -> None:
    """Of a shared subscription; an exclusive holder would have to know the lease that it did not hear of."""
    publish(log, 2)
    client = Client(log, mode="shared")
    client.fetch()
    asked = client.proof()
    client.resume(proof=asked)
    unheard_of = client.connection
    assert client.resume(proof=asked) == [(1, 1), (2, 1)]
    run_blocking(unheard_of.close(vanished=True))
    assert client.fetch() == []
    client.ack(1, 2)


# --- handed out, and never arrived --------------------------------------------------------------------------------


def test_what_never_arrived_comes_again_and_is_no_attempt(log: Log, broken: Break) -> None:
    publish(log, 5)
    client = Client(log, max_attempts=1)
    client.fetch(4, arriving=1)
    broken(client)
    assert client.resume() == [(1, 1)]
    assert client.fetch() == [(2, 1), (3, 1), (4, 1), (5, 1)], "all at once: none of them is suspect"


def test_a_retry_that_never_arrived_keeps_its_count(log: Log, broken: Break) -> None:
    publish(log, 2)
    client = Client(log)
    client.fetch()
    client.nack(1)
    client.fetch(arriving=0)
    broken(client)
    assert client.resume() == [(2, 1)]
    assert client.fetch() == [(1, 2)]


def test_twenty_times_never_arrived(log: Log, broken: Break) -> None:
    publish(log, 3)
    client = Client(log, max_attempts=1)
    for _ in range(20):
        assert client.fetch(arriving=0) == [(1, 1), (2, 1), (3, 1)]
        broken(client)
        assert client.resume() == []


def test_what_waits_in_front_does_not_hide_it(log: Log, broken: Break, clock: ManualClock) -> None:
    """Retries that are due come before it, as many as may be in flight, and are none of its business."""
    publish(log, 4)
    client = Client(log, max_in_flight=2, max_attempts=2)
    client.fetch()
    client.nack(1, 2, delay_ms=10)
    assert client.fetch(arriving=0) == [(3, 1), (4, 1)]
    clock.advance(0.01)
    broken(client)
    client.resume()
    assert client.fetch() == [(1, 2), (2, 2)]
    client.ack(1, 2)
    assert client.fetch() == [(3, 1), (4, 1)]


def test_a_later_attempt_that_never_arrived_is_no_attempt(log: Log, broken: Break, clock: ManualClock) -> None:
    """The client was too slow and it was delivered again, to the client itself, which may go on."""
    publish(log, 1)
    client = Client(log, ack_wait=ACK_WAIT_MS / 1000, lease=3_600)
    client.fetch()
    clock.advance(ACK_WAIT_MS / 1000)
    assert client.fetch(arriving=0) == [(1, 2)]
    broken(client)
    assert client.resume() == [(1, 1)]
    client.nack(1)
    assert client.fetch() == [(1, 2)]


@pytest.mark.parametrize("is_given_back", [False, True])
def test_a_suspect_that_was_never_sent_keeps_its_count(log: Log, broken: Break, is_given_back: bool) -> None:
    """What gives it back makes it no attempt; the resume must not do so once more."""
    publish(log, 1)
    killed = Client(log)
    killed.fetch()
    killed.vanish()
    client = Client(log)
    found = run_blocking(client.connection.take(1, 0.0))
    assert [claimed.attempt for claimed in found] == [2]
    if is_given_back:
        client.connection.release(found).wait()
    else:
        client.connection.put_back(found)
    broken(client)
    assert client.resume() == []
    assert client.fetch() == [(1, 2)]


def test_of_a_shared_subscription_it_comes_back_like_that_of_any_vanished_consumer(log: Log) -> None:
    publish(log, 3)
    client, other = Client(log, mode="shared"), Client(log, mode="shared")
    client.fetch(arriving=1)
    client.vanish()
    assert client.resume() == [(1, 1)]
    assert [other.fetch(), other.fetch()] == [[(2, 2)], []], "one at a time, for one may have killed it"
    other.ack(2)
    assert other.fetch() == [(3, 2)]


# --- settled, or passed on ----------------------------------------------------------------------------------------


def test_an_ack_that_got_through_is_reported(log: Log, mode: Any, broken: Break) -> None:
    publish(log, 4)
    client = Client(log, mode=mode)
    client.fetch()
    client.ack(2, 3, answered=False)
    broken(client)
    assert client.resume() == [(1, 1), (4, 1)]
    assert client.settled == [2, 3]
    client.ack(1, 4)
    assert log.subscription("s").acked == 4


def test_a_reject_that_got_through_is_reported(log: Log, mode: Any, broken: Break) -> None:
    publish(log, 1)
    client = Client(log, mode=mode)
    client.fetch()
    client.reject(1, answered=False)
    broken(client)
    assert (client.resume(), client.settled) == ([], [1])


def test_a_nack_that_got_through_may_be_sent_again(log: Log, mode: Any, broken: Break) -> None:
    publish(log, 1)
    client = Client(log, mode=mode, jitter=0)
    client.fetch()
    client.nack(1, delay_ms=60_000, answered=False)
    broken(client)
    assert client.resume() == [(1, 1)]
    client.nack(1)
    assert client.fetch() == [(1, 2)], "sent twice, counted once"


def test_a_nack_may_be_sent_again_though_the_next_attempt_was_handed_out(log: Log, broken: Break) -> None:
    """And never arrived: then the client knows of its own attempt alone, and waits for the answer to its nack."""
    publish(log, 1)
    client = Client(log, jitter=0)
    client.fetch()
    client.nack(1, answered=False)
    assert client.fetch(arriving=0) == [(1, 2)]
    broken(client)
    assert client.resume() == [(1, 1)]
    client.nack(1)
    assert client.fetch() == [(1, 2)], "sent twice, counted once"


@pytest.mark.parametrize("seq", [2, 99])
def test_what_was_never_delivered_is_neither(log: Log, mode: Any, broken: Break, seq: int) -> None:
    publish(log, 2)
    client = Client(log, mode=mode)
    client.fetch(1)
    broken(client)
    lie = Resume(client.name, [(seq, 1), (seq, 0)])
    assert (client.resume(proof=lie), client.settled) == ([], [])


def test_a_delayed_message_cannot_be_claimed_so(log: Log, mode: Any, broken: Break) -> None:
    """It has a row that was never delivered."""
    publish(log, 1, delay=60)
    client = Client(log, mode=mode)
    assert client.fetch() == []
    broken(client)
    lie = Resume(client.name, [(1, 0)])
    assert (client.resume(proof=lie), client.settled) == ([], [])


def test_what_another_was_given_since_is_the_others(log: Log) -> None:
    publish(log, 3)
    client, other = Client(log, mode="shared"), Client(log, mode="shared")
    client.fetch()
    client.vanish()
    assert other.fetch() == [(1, 2)]
    assert client.resume() == [(2, 1), (3, 1)]
    assert client.settled == []
    other.ack(1)
    client.ack(2, 3)
    assert log.subscription("s").lag == 0
