"""What a server process logs: one line a record, whatever clients call themselves."""

import io
import json
import logging
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.server import logging as logs
from headwater.server.logging import ALIKE_A_SECOND_MAX, JsonFormatter, LineLimit, TextFormatter


def record(message: str, *arguments: object, level: int = logging.INFO, **extra: object) -> logging.LogRecord:
    made = logging.getLogger("headwater.server").makeRecord(
        "headwater.server", level, __file__, 1, message, arguments, None, extra=extra
    )
    made.created = 1_785_320_400.123456
    return made


def failed(message: str) -> logging.LogRecord:
    try:
        raise ValueError("two\nlines")
    except ValueError as exc:
        made = record(message, level=logging.ERROR)
        made.exc_info = (type(exc), exc, exc.__traceback__)
        return made


def test_json_has_time_level_logger_message_and_fields():
    line = JsonFormatter().format(record("client left", address="::1", label="shop", seconds=1.5, vanished=False))
    assert json.loads(line) == {
        "time": "2026-07-29T10:20:00.123Z",
        "level": "info",
        "logger": "headwater.server",
        "message": "client left",
        "address": "::1",
        "label": "shop",
        "seconds": 1.5,
        "vanished": False,
    }


def test_what_a_message_says_by_name_is_a_field_in_json_and_is_not_sent_twice_in_text():
    output = record("serving %(log)s on %(url)s", {"log": "events.db", "url": "ws://x:1"}, clients=3)
    fields = json.loads(JsonFormatter().format(output))
    assert (fields["message"], fields["log"], fields["url"]) == (
        "serving events.db on ws://x:1",
        "events.db",
        "ws://x:1",
    )
    assert TextFormatter().format(output).endswith(" info    serving events.db on ws://x:1 clients=3")


def test_empty_fields_are_left_out():
    assert TextFormatter().format(record("client connected", address="::1", label="")).endswith("connected address=::1")
    assert "label" not in json.loads(JsonFormatter().format(record("client connected", label="", why=None)))


def test_text_quotes_what_is_more_than_a_word():
    line = TextFormatter().format(record("refused", why="no token", a='say "x"', b="x=1", c=True))
    assert line.endswith('refused why="no token" a="say \\"x\\"" b="x=1" c=true')


def test_an_error_brings_its_stack():
    fields = json.loads(JsonFormatter().format(failed("method x failed")))
    assert fields["stack"].startswith("Traceback")
    assert fields["stack"].endswith("ValueError: two\nlines")
    lines = TextFormatter().format(failed("method x failed")).split("\n")
    assert lines[0].endswith("error   method x failed")
    assert all(line.startswith("    ") for line in lines[1:])
    assert lines[-2:] == ["    ValueError: two", "    lines"]


def test_long_texts_are_cut():
    long = "x" * 10_000
    assert len(json.loads(JsonFormatter().format(record(long, label=long)))["message"]) == logs.TEXT_CHARS_MAX + 1
    assert len(TextFormatter().format(record(long, label=long))) < 2 * logs.TEXT_CHARS_MAX + 100


@given(st.text(), st.dictionaries(st.sampled_from(["address", "label", "why"]), st.text() | st.integers() | st.none()))
def test_a_record_is_one_line_that_cannot_steer_a_terminal(message: str, fields: dict[str, object]):
    [line] = JsonFormatter().format(record("%(text)s", {"text": message}, **fields)).splitlines() or [""]
    found = json.loads(line)
    assert found["message"] == message
    assert {name: found[name] for name in fields if name in found} == {
        name: value for name, value in fields.items() if value not in (None, "")
    }
    assert TextFormatter().format(record("%(text)s", {"text": message}, **fields)).isprintable()


def test_what_json_cannot_say_is_reported_as_text():
    assert json.loads(JsonFormatter().format(record("x", what={1, 2})))["what"] == "{1, 2}"


@pytest.fixture
def loggers() -> Iterator[None]:
    """Leave the loggers of the test process as they were."""
    before = [(name, logging.getLogger(name)) for name in logs.LOGGERS]
    kept = [(logger, logger.handlers[:], logger.level, logger.propagate) for _, logger in before]
    yield
    logging.captureWarnings(False)
    for logger, handlers, level, propagate in kept:
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logger.propagate = propagate


@pytest.mark.usefixtures("loggers")
def test_set_up_writes_what_is_at_least_so_important():
    out = io.StringIO()
    logs.set_up("json", "info", out)
    logging.getLogger("headwater.server").debug("too small")
    logging.getLogger("headwater.server").info("small", extra={"size": 1})
    logging.getLogger("asyncio").error("big")
    logging.getLogger("asyncio").info("not ours, and small")
    assert [json.loads(line)["message"] for line in out.getvalue().splitlines()] == ["small", "big"]


@pytest.mark.usefixtures("loggers")
def test_set_up_again_does_not_say_everything_twice():
    out = io.StringIO()
    logs.set_up("text", "debug", io.StringIO())
    logs.set_up("text", "debug", out)
    logging.getLogger("headwater").debug("once")
    assert out.getvalue().count("once") == 1


def test_lines_of_a_kind_are_limited_and_those_left_out_are_counted() -> None:
    now_s = 0.0
    limit = LineLimit(lambda: now_s)

    def passes(line: int = 1) -> logging.LogRecord | None:
        record = logging.LogRecord("headwater.server", logging.WARNING, "x.py", line, "again", None, None)
        return record if limit.filter(record) else None

    assert sum(passes() is not None for _ in range(100)) == ALIKE_A_SECOND_MAX
    assert passes(2) is not None, "another kind"
    now_s += 1
    after = passes()
    assert after is not None
    assert after.__dict__["left_out"] == 100 - ALIKE_A_SECOND_MAX
