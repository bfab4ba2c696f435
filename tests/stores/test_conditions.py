"""Python and SQL agree on what a subscription asks for: random messages and conditions, in SQLite and in PostgreSQL."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from condition_databases import NUMBER_FIELDS, TEXT_FIELDS, Asked, InPostgres, InSqlite
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from postgres_server import PostgresServer

from headwater.delivery.filters import (
    INT64,
    WHERE_DEPTH_MAX,
    WHERE_TERMS_MAX,
    EntityFilter,
    parse_entity_filter,
    parse_where,
)
from headwater.errors import InvalidPatternError
from headwater.stores.conditions import topic_condition
from headwater.stores.postgres import conditions as postgres_conditions
from headwater.topics import parse_pattern
from headwater.topics.pattern import Dialect

EXAMPLES = settings(max_examples=300, deadline=None)


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest) -> Iterator[InSqlite | InPostgres]:
    if request.param == "sqlite":
        opened: InSqlite | InPostgres = InSqlite()
    else:
        server: PostgresServer = request.getfixturevalue("postgres")
        opened = InPostgres(server.url_of("postgres"))
    yield opened
    opened.close()


def check(
    database: InSqlite | InPostgres, asked: Asked, row: Mapping[str, object], expected: bool, negated: bool = False
) -> None:
    assume(database.keeps_nul or not any("\0" in value for value in row.values() if isinstance(value, str)))
    condition = asked.condition
    found = database.selects(condition, row)
    if asked.exact and found is not None:
        assert found is expected
        if negated:
            assert database.selects(type(condition)(f"NOT {condition.sql}", condition.params), row) is not expected
    else:
        assert found is not False or not expected, "nothing may be left out"


def row_of(message: dict[str, Any], *, ascii_json: bool = True) -> dict[str, object]:
    headers = message["headers"]
    return {
        **message,
        "headers": None if headers is None else json.dumps(headers),
        "data": json.dumps(message["data"], ensure_ascii=ascii_json),
    }


# --- random messages ----------------------------------------------------------------------------------------

KEYS = st.sampled_from(
    [
        "a",
        "b",
        "in",
        "",
        "0",
        "odd key",
        "a.b",
        "[0]",
        'q"',
        "'",
        "\\",
        "\\u0061",
        "\n",
        "\0",
        "é",
        "😀",
        "\ufffe",
    ]
)
TEXTS = st.one_of(
    st.sampled_from(
        [
            "",
            "a",
            "ab",
            "b",
            "1",
            "5",
            "true",
            "null",
            "{}",
            "[1]",
            "\ud7ff",
            "\ue000",
            "\uffff",
            "😀",
            "a\0b",
            "\0",
        ]
    ),
    st.text(max_size=4),
)
FAR_INTEGERS = [2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**63 + 1025, 2**64, 2**64 + 2049, 10**30 + 7, 10**400]
NUMBERS = st.one_of(
    st.integers(-3, 7),
    st.sampled_from([sign * number for number in FAR_INTEGERS for sign in (1, -1)]),
    st.sampled_from([-0.0, 1.0, 1.5, 5.0, 2.0**53, 2.0**63, -(2.0**63), 1e30, 1e308, 5e-324]),
    st.floats(allow_nan=False, allow_infinity=False),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
DOCUMENTS = st.recursive(
    st.one_of(SCALARS, st.sampled_from(["\ud800", "\udc00a"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
MESSAGES = st.fixed_dictionaries(
    {
        **dict.fromkeys(TEXT_FIELDS, st.none() | TEXTS),
        **dict.fromkeys(NUMBER_FIELDS, st.none() | st.integers(-3, 7)),
        "topic": TEXTS,
        "seq": st.integers(-3, 7) | st.sampled_from([2**63 - 1, -(2**63)]),
        "headers": st.none() | st.dictionaries(KEYS, DOCUMENTS, max_size=3),
        "data": DOCUMENTS,
    }
)


# --- random conditions --------------------------------------------------------------------------------------


def literal(value: object) -> str:
    return json.dumps(value)


VALUES = SCALARS.filter(lambda value: not isinstance(value, int) or value in INT64)
ORDERED_VALUES = VALUES.filter(lambda value: value is not None and not isinstance(value, bool))
STEPS = st.lists(
    st.one_of(
        KEYS.map(lambda key: f"[{literal(key)}]"),
        st.integers(0, 3).map("[{}]".format),
        st.just(".a"),
        st.just(".b"),
    ),
    max_size=3,
).map("".join)
PATHS = st.one_of(
    STEPS.map("data{}".format),
    st.tuples(KEYS, STEPS).map(lambda drawn: f"headers[{literal(drawn[0])}]{drawn[1]}"),
    st.sampled_from([*TEXT_FIELDS, *NUMBER_FIELDS]),
)
LEAVES = st.one_of(
    PATHS,
    st.builds("{} {} {}".format, PATHS, st.sampled_from(["==", "!="]), VALUES.map(literal)),
    st.builds("{} {} {}".format, PATHS, st.sampled_from(["<", "<=", ">", ">="]), ORDERED_VALUES.map(literal)),
    st.builds("{} {} {}".format, PATHS, st.sampled_from(["starts with", "contains"]), TEXTS.map(literal)),
    st.builds("{} in {}".format, PATHS, st.lists(VALUES, min_size=1, max_size=5).map(literal)),
)
CONDITIONS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        inner.map("not ({})".format),
        st.lists(inner, min_size=2, max_size=3).map(lambda terms: "(" + " and ".join(terms) + ")"),
        st.lists(inner, min_size=2, max_size=3).map(lambda terms: "(" + " or ".join(terms) + ")"),
    ),
    max_leaves=6,
)


@EXAMPLES
@given(message=MESSAGES, text=CONDITIONS, ascii_json=st.booleans())
def test_where_means_the_same_in_python_and_sql(
    database: InSqlite | InPostgres, message: dict[str, Any], text: str, ascii_json: bool
) -> None:
    ascii_json = ascii_json or "\\ud" in json.dumps(message["data"])  # half a pair can only be written escaped
    where = parse_where(text)
    if database.fills_in_size and message["size"] is None:
        message = {**message, "size": 0}
    row = row_of(message, ascii_json=ascii_json)
    check(database, database.where(where), row, where.holds(message.__getitem__), negated=True)


COMPARISONS = st.one_of(
    st.tuples(st.sampled_from(["==", "!=", "<", "<=", ">", ">="]), ORDERED_VALUES),
    st.tuples(st.sampled_from(["starts with", "contains"]), TEXTS),
)


@EXAMPLES
@given(value=SCALARS | DOCUMENTS, comparison=COMPARISONS)
@example(value=2**53 + 1, comparison=(">", 2.0**53))
@example(value=2**63 + 1, comparison=("==", 2.0**63))
@example(value=-(2**63) - 1, comparison=("==", -(2**63)))
@example(value=10**400, comparison=(">", 1.7976931348623157e308))
@example(value=6559673030301203393915946580291635, comparison=("<", 6.559673030301204e33))
@example(value=True, comparison=("==", 1))
@example(value=[1], comparison=("==", "[1]"))
@example(value="\ud800", comparison=("<", "\ue000"))
@example(value="a\0b", comparison=("starts with", "a\0"))
@example(value="a\0b", comparison=("contains", "\0b"))
@example(value="", comparison=("starts with", ""))
@example(value=1.2345678901234568e18, comparison=("==", 1.2345678901234568e18))
@example(value=1234567890123456800, comparison=("==", 1.2345678901234568e18))
@example(value=1.2345678901234568e18, comparison=("==", 1234567890123456800))
@example(value=1.2345678901234568e18, comparison=("<", 1234567890123456800))
@example(value=2.0**53, comparison=(">=", 2**53 + 1))
@example(value=-(2.0**53), comparison=(">", -(2**53) - 1))
@example(value=0.1, comparison=("==", 0.1))
@example(value=5e-324, comparison=(">", 0))
@example(value=-(10**20) - 7, comparison=("==", -1e20))
def test_values_compare_the_same(
    database: InSqlite | InPostgres, value: object, comparison: tuple[str, object]
) -> None:
    operator, operand = comparison
    where = parse_where(f"data {operator} {literal(operand)}")
    row = {"topic": "t", "data": json.dumps(value)}
    check(database, database.where(where), row, where.holds(lambda field: value))


def test_the_largest_conditions_are_within_the_limits_of_the_database(database: InSqlite | InPostgres) -> None:
    nested = "not (" * (WHERE_DEPTH_MAX // 2) + "data.a or data.b" + ")" * (WHERE_DEPTH_MAX // 2)
    texts = [
        " or ".join(["data.a == 1"] * WHERE_TERMS_MAX),
        " and ".join(["type != 'a'"] * (WHERE_TERMS_MAX - 2)) + f" and {nested}",
        f"data.a in [{','.join('1' * 900)}]",
        "data" + ".a" * 900,
        "data" + "[0]" * 600,
    ]
    for text in texts:
        where = parse_where(text)
        data = {"a": 1}
        row = {"topic": "t", "data": json.dumps(data)}
        assert database.selects(database.where(where).condition, row) is where.holds({"data": data}.get)


def test_no_user_text_is_in_the_sql(database: InSqlite | InPostgres) -> None:
    where = parse_where("""type == "x' OR 1" and data["k') --"] in ['secret'] and headers.secret contains 'secret'""")
    for text in ("secret", "--", " OR 1"):
        assert text not in database.where(where).condition.sql
    assert "secret" not in database.entities(parse_entity_filter(from_="secret", to="secret")).condition.sql
    assert "secret" not in database.topics(parse_pattern("secret.*")).condition.sql


# --- entities and topics ------------------------------------------------------------------------------------

NAMES = st.sampled_from(["a", "b", "A", "5", "/", "é", "a\0"])
MATCHERS = st.one_of(st.none(), NAMES, st.lists(NAMES | st.just("/^a/"), min_size=1, max_size=3))


@EXAMPLES
@given(
    filter_=st.builds(parse_entity_filter, from_=MATCHERS, to=MATCHERS, broadcast=st.booleans()),
    from_=st.none() | NAMES,
    to=st.none() | NAMES,
)
def test_entities_mean_the_same_in_python_and_sql(
    database: InSqlite | InPostgres, filter_: EntityFilter, from_: str | None, to: str | None
) -> None:
    row = {"topic": "t", "data": "1", "from": from_, "to": to}
    check(database, database.entities(filter_), row, filter_.keeps(from_, to))


@pytest.mark.parametrize(
    ("filter_", "exact"),
    [
        (parse_entity_filter(), True),
        (parse_entity_filter(from_=["a", "b"], to="c", broadcast=True), True),
        (parse_entity_filter(from_=["a", "/b/"]), False),
        (parse_entity_filter(to="/b/"), False),
    ],
)
def test_only_a_regex_needs_python(database: InSqlite | InPostgres, filter_: EntityFilter, exact: bool) -> None:
    assert database.entities(filter_).exact is exact


TOKENS = st.sampled_from(["a", "ab", "b", "é", "\ud7ff", "\U0010ffff", "a\U0010ffff"])
TOPICS = st.lists(TOKENS, min_size=1, max_size=4).map(".".join)
PATTERNS = st.lists(TOKENS | st.sampled_from(["*", "#", ">"]), min_size=1, max_size=4).map(".".join)


@EXAMPLES
@given(text=PATTERNS | TOPICS, dialect=st.sampled_from(["nats", "amqp"]), topic=TOPICS)
@example(text="a.>", dialect="nats", topic="a")
@example(text="a.#", dialect="amqp", topic="a")
@example(text="\U0010ffff.#", dialect="amqp", topic="\U0010ffff.a")
@example(text="\ud7ff.#", dialect="amqp", topic="\ud7ff.a")
def test_topics_mean_the_same_in_python_and_sql(
    database: InSqlite | InPostgres, text: str, dialect: Dialect, topic: str
) -> None:
    try:
        pattern = parse_pattern(text, dialect)
    except InvalidPatternError:
        return
    check(database, database.topics(pattern), {"topic": topic, "data": "1"}, pattern.matches(topic))


@pytest.mark.parametrize(("text", "exact"), [(">", True), ("a.b", True), ("a.>", True), ("a.*", False)])
def test_only_single_wildcards_need_python(database: InSqlite | InPostgres, text: str, exact: bool) -> None:
    assert database.topics(parse_pattern(text)).exact is exact


def test_only_the_character_nul_needs_python() -> None:
    for text, exact in (("data.a == 'x'", True), ("data.a == '\\u0000'", False), ("data['\\u0000'] == 1", False)):
        assert postgres_conditions.where_condition(parse_where(text))[1] is exact


def test_in_sqlite_a_prefix_is_searched_by_index() -> None:
    condition, _ = topic_condition(parse_pattern("orders.>"))
    log = InSqlite().log
    log.execute("CREATE INDEX by_topic ON messages (topic)")
    plan = log.execute(f"EXPLAIN QUERY PLAN SELECT 1 FROM messages WHERE {condition.sql}", condition.params).fetchall()
    log.close()
    assert "by_topic (topic>? AND topic<?)" in str(plan)
