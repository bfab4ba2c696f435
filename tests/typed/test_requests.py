"""Requests and replies, over real logs."""

import asyncio
import threading
from decimal import Decimal

import pytest

import headwater
from headwater.errors import InvalidMessageError, InvalidOptionError, NoReplyError, UnknownTypeError
from headwater.typed.handling import answer_id

TIME_LIMIT_S = 20


@pytest.fixture
def asked(base):
    class PriceAsked(base, topic="prices.asked", from_="shop"):
        sku: str

    return PriceAsked


@pytest.fixture
def quoted(base):
    class PriceQuoted(base):
        price: Decimal

    return PriceQuoted


def replies(log) -> list[headwater.Message]:
    with log.subscribe("look", "_reply.>", mode="ephemeral", start="first") as subscription:
        return [each.message for each in subscription.fetch(100)]


def test_a_request_gets_its_own_reply(asked, quoted, any_log):
    @asked.on(any_log, id="pricer", concurrency=4, mode="shared")
    def price(question):
        return quoted(price=len(question.sku))

    any_log.start()
    answers: dict[str, Decimal] = {}

    def ask(sku: str) -> None:
        answers[sku] = asked(sku=sku).request(any_log, reply=quoted, timeout=TIME_LIMIT_S).price

    threads = [threading.Thread(target=ask, args=("x" * length,)) for length in range(1, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIME_LIMIT_S)
    any_log.stop()
    assert answers == {"x" * length: length for length in range(1, 6)}
    stored = replies(any_log)
    assert len({message.topic for message in stored}) == 1
    assert {(message.type, message.to) for message in stored} == {("PriceQuoted", "shop")}


def test_the_request_says_where_to_answer(asked, quoted, log):
    @asked.on(log, id="pricer")
    def price(question, message):
        assert message.reply_to.startswith("_reply.")
        assert message.correlation_id == "c-1"
        return quoted(price=1)

    log.start()
    asked(sku="a").request(log, reply=quoted, timeout=TIME_LIMIT_S, correlation_id="c-1")
    log.stop()
    [reply] = replies(log)
    assert reply.correlation_id == "c-1"


def test_requests_on_one_log_leave_one_topic_behind(asked, quoted, log):
    @asked.on(log, id="pricer")
    def price(question):
        return quoted(price=1)

    log.start()
    for correlation_id in (None, None, "c-1", "c-1"):
        asked(sku="a").request(log, reply=quoted, timeout=TIME_LIMIT_S, correlation_id=correlation_id)
    log.stop()
    topics = [message.topic for message in replies(log)]
    assert len(topics) == 4
    # Another request may have the same correlation_id if its caller chose it, so that one needs its own topic.
    assert len(set(topics)) == 3
    assert topics[0] == topics[1]


def test_two_logs_do_not_hear_each_others_replies(asked, quoted, tmp_path):
    with headwater.open(tmp_path / "log.db") as one, headwater.open(tmp_path / "log.db") as two:

        @asked.on(one, id="pricer")
        def price(question):
            return quoted(price=1)

        one.start()
        for log in (one, two):
            asked(sku="a").request(log, reply=quoted, timeout=TIME_LIMIT_S)
        one.stop()
        assert len({message.topic for message in replies(one)}) == 2


def test_a_request_without_an_answer_times_out(asked, quoted, log):
    with pytest.raises(NoReplyError) as caught:
        asked(sku="a").request(log, reply=quoted, timeout=0.01)
    assert str(caught.value) == (
        "PriceAsked on prices.asked: no reply within 0.01 s. See that a handler of it runs and returns its reply, or "
        "give it more time with timeout=…"
    )


@pytest.mark.parametrize("correlation_id", [None, "c-1"])
def test_a_reply_to_something_else_is_not_taken_for_ours(asked, quoted, log, correlation_id):
    @log.on("prices.asked", id="confused")
    def answer(message):
        log.publish(message.reply_to, {"price": 1}, type="PriceQuoted", correlation_id="another")
        log.publish(message.reply_to, {"price": 2}, type="PriceQuoted", correlation_id=message.correlation_id)

    log.start()
    quote = asked(sku="a").request(log, reply=quoted, timeout=TIME_LIMIT_S, correlation_id=correlation_id)
    assert quote.price == 2
    log.stop()


def test_one_of_several_replies(asked, quoted, base, log):
    class Refused(base):
        why: str

    @asked.on(log, id="pricer")
    def price(question):
        return Refused(why="unknown") if question.sku == "?" else quoted(price=1)

    log.start()
    assert asked(sku="?").request(log, reply=(quoted, Refused), timeout=TIME_LIMIT_S) == Refused(why="unknown")
    with pytest.raises(UnknownTypeError, match="its type is 'Refused', and this wants PriceQuoted"):
        asked(sku="?").request(log, reply=quoted, timeout=TIME_LIMIT_S)
    log.stop()


def test_a_redelivered_request_is_answered_once(asked, quoted, log):
    attempts: list[int] = []
    done = threading.Event()

    @asked.on(log, id="pricer", backoff=0, jitter=0, auto_ack=False)
    def price(question, message):
        attempts.append(message.attempt)
        if message.attempt == 1:
            message.nack(0)
        else:
            done.set()
            message.ack()
        return quoted(price=message.attempt)

    log.start()
    answer = asked(sku="a").request(log, reply=quoted, timeout=TIME_LIMIT_S, id="q-1")
    assert done.wait(TIME_LIMIT_S)
    log.stop()
    assert (answer.price, attempts) == (1, [1, 2])
    assert [message.id for message in replies(log)] == [answer_id("prices.asked#q-1", "pricer")]


def test_requests_of_one_id_on_two_topics_are_both_answered(asked, quoted, log):
    """Both answers go to one topic, and their ids follow from those of the requests."""
    handled = threading.Semaphore(0)

    @asked.on(log, id="pricer", pattern=">", others="skip")
    def price(question):
        handled.release()
        return quoted(price=1)

    for topic in ("prices.asked", "offers.asked"):
        log.publish(topic, {"sku": "a"}, type="PriceAsked", id="q-1", reply_to="_reply.here")
    log.start()
    for _ in range(2):
        assert handled.acquire(timeout=TIME_LIMIT_S)
    log.stop()
    assert len(replies(log)) == 2


def test_two_handlers_give_two_answers():
    assert answer_id("a", "b") == answer_id("a", "b") != answer_id("a", "c")
    assert answer_id("a", "b") != answer_id("b", "b")


def test_an_answer_without_a_reply_topic_is_not_published(asked, quoted, log):
    done = threading.Event()

    @asked.on(log, id="pricer")
    def price(question):
        if question.sku == "last":
            done.set()
        return quoted(price=1)

    log.start()
    asked(sku="a").publish(log)
    asked(sku="last").publish(log)
    assert done.wait(TIME_LIMIT_S)
    log.stop()
    assert log.last_seq() == 2


def test_answers_that_are_no_events_and_places_that_are_no_topics_are_dead_letters(asked, quoted, log):
    done = threading.Event()

    @asked.on(log, id="pricer")
    def price(question):
        if question.sku == "last":
            done.set()
        return {"price": 1} if question.sku == "dict" else quoted(price=1)

    log.start()
    asked(sku="dict").publish(log, reply_to="answers")
    asked(sku="odd").publish(log, reply_to="answers.*")
    asked(sku="last").publish(log)
    assert done.wait(TIME_LIMIT_S)
    log.stop()
    errors = [letter.error for letter in log.dead_letters.list()]
    assert errors[0].startswith("InvalidMessageError: message 1 on prices.asked: handler pricer answered with a dict")
    assert errors[1].startswith("InvalidMessageError: topic 'answers.*': it holds '*'")
    assert log.last_seq() == 3


def test_what_cannot_be_asked_is_refused_before_anything_is_published(asked, quoted, log):
    for timeout in (0, -1, "5", True, 1e9):
        with pytest.raises(InvalidOptionError, match="timeout is seconds"):
            asked(sku="a").request(log, reply=quoted, timeout=timeout)
    with pytest.raises(InvalidOptionError, match="a request has a reply_to of its own"):
        asked(sku="a").request(log, reply=quoted, reply_to="x")
    for reply in ((), None, [quoted], Decimal):
        with pytest.raises(InvalidOptionError, match="reply is a class of events, or several, not"):
            asked(sku="a").request(log, reply=reply)
    with pytest.raises(InvalidMessageError):
        asked.model_construct(sku=1).request(log, reply=quoted)
    assert log.last_seq() == 0


def test_requests_on_asyncio(asked, quoted):
    async def story() -> list[Decimal]:
        async with headwater.open_async("memory:") as log:

            @asked.on(log, id="pricer")
            async def price(question):
                return quoted(price=len(question.sku))

            await log.start()
            with asked.bind(log):
                asking = [asked(sku=sku).request(reply=quoted, timeout=TIME_LIMIT_S) for sku in ("a", "bb", "ccc")]
                answers = await asyncio.gather(*asking)
            await log.stop()
            with pytest.raises(NoReplyError):
                await asked(sku="a").request(log, reply=quoted, timeout=0.01)
            return [answer.price for answer in answers]

    assert asyncio.run(story()) == [1, 2, 3]
