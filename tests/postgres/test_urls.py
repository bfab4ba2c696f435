"""Where a log is, read from its url; and no password where people look."""

from __future__ import annotations

import traceback

import pytest

import headwater
from headwater.errors import HeadwaterError, InvalidOptionError, StoreError
from headwater.stores.postgres.connection import place_of


def test_a_url_names_the_database_and_the_schema() -> None:
    place = place_of("postgres://app:secret@db.example.org:5433/shop?schema=orders&sslmode=require")
    assert (place.schema, place.channel) == ("orders", "headwater_orders")
    assert place.name == "postgres://app@db.example.org:5433/shop?schema=orders&sslmode=require"
    assert "sslmode=require" in place.conninfo
    assert "schema" not in place.conninfo


@pytest.mark.parametrize("schema", ["Orders", "1st", "pg_orders", "a;b", "a b", 'a"b', "x" * 51])
def test_a_schema_is_a_plain_name(schema: str) -> None:
    with pytest.raises(InvalidOptionError, match="schema"):
        place_of(f"postgres://db/shop?schema={schema}")


def test_what_the_server_says_comes_with_advice(postgres_url: str) -> None:
    elsewhere = postgres_url.rpartition("/")[0]
    with pytest.raises(StoreError, match="createdb") as refused:
        headwater.open(f"{elsewhere}/nosuch")
    assert not isinstance(refused.value, ConnectionError)  # trying again does not help
    with pytest.raises(StoreError, match="createuser"):
        headwater.open(postgres_url.replace("postgres@", "nosuch@"))
    with pytest.raises(InvalidOptionError, match="schema=headwater"):
        headwater.open(f"{postgres_url}?shema=x")


@pytest.mark.parametrize(
    "url",
    [
        "postgres://app:hunter2@127.0.0.1:1/shop",
        "postgres://127.0.0.1:1/shop?user=app&password=hunter2",
        "postgres://app:hun/ter2@127.0.0.1:1/shop",
        "postgres://app:hun?ter2@127.0.0.1:1/shop",
        "postgres://app:hun%zzter2@127.0.0.1:1/shop",
    ],
)
def test_no_error_tells_a_password(url: str) -> None:
    with pytest.raises((InvalidOptionError, StoreError)) as refused:
        headwater.open(url, busy_timeout=0.1)
    reported = "".join(traceback.format_exception(refused.value))
    assert isinstance(refused.value, HeadwaterError)
    assert "ter2" not in reported.replace(f'"{url}"', "")


def test_several_hosts_may_have_ports_of_their_own() -> None:
    place = place_of("postgres://user:secret@one:5432,two:5433/db")
    assert "host=one,two" in place.conninfo
    assert "port=5432,5433" in place.conninfo
    assert place.name == "postgres://user@one:5432,two:5433/db"
