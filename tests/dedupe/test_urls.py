"""Where a dedupe queue is, as a url says it; and that no error shows a password."""

from __future__ import annotations

import pytest

from headwater.errors import InvalidOptionError
from headwater.stores.dedupe import open_dedupe


def test_a_url_without_a_queue_behind_it_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match="no dedupe queue for http"):
        open_dedupe("http://example.org")


@pytest.mark.parametrize("url", ["memory:", "seen.db", "postgres://host/db", "redis://host/0"])
def test_an_option_that_there_is_not_is_refused_with_those_that_there_are(url: str) -> None:
    with pytest.raises(InvalidOptionError, match=r"unknown option 'max_cout'\. Known: max_count, max_age, clock"):
        open_dedupe(url, max_cout=3)


def test_passwords_are_not_shown(postgres_url: str) -> None:
    queue = open_dedupe(postgres_url.replace("postgres@", "postgres:secret@"))
    try:
        assert "secret" not in queue.name
        assert queue.name.startswith("postgres://postgres@127.0.0.1:")
    finally:
        queue.close()


@pytest.mark.parametrize(
    "url",
    [
        "postgres://user:se/cret@host/db",
        "postgres://user:se?cret@host/db",
        "postgres://user:se#cret@host/db",
        "postgres://user:cret%zz@host/db",
        "postgres://user:cret@host:port/db",
        "postgres://user:cret@[host/db",
        "postgres://user@host/db?cret=1",
    ],
)
def test_a_url_that_cannot_be_read_is_refused_without_a_word_of_it(url: str) -> None:
    with pytest.raises(InvalidOptionError) as refused:
        open_dedupe(url)
    assert "cret" not in str(refused.value)
    assert refused.value.__cause__ is None
