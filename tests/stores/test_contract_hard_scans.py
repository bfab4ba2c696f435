"""What every store promises where scanning is hard: content that a database cannot read, topics that are far away."""

from typing import Any

import pytest

from headwater.delivery.filters import parse_where
from headwater.delivery.publishing import DedupeWindow
from headwater.message import Draft, make_draft
from headwater.ports.records import Selection
from headwater.ports.store import Store
from headwater.stores import sql
from headwater.topics import parse_pattern

NOW = 1_700_000_000_000


def draft(topic: str, data: Any = None) -> Draft:
    return make_draft(topic, data, {}, NOW)


def append(store: Store, *drafts: Draft) -> None:
    with store.write() as writer:
        writer.append(drafts, NOW, DedupeWindow())


def selection(pattern: str, where: str | None = None) -> Selection:
    return Selection(parse_pattern(pattern), where=None if where is None else parse_where(where))


def scanned(store: Store, selected: Selection, after: int = 0) -> list[int]:
    """As a subscription reads: call again from `scanned_to` until the whole log has been looked through."""
    found: list[int] = []
    with store.read() as reader:
        while after < reader.last_seq():
            messages, after = reader.scan(selected, after, 1_000)
            found += [message.seq for message in messages]
    return found


@pytest.mark.parametrize(
    ("where", "kept"),
    [
        ("data.n > 1", [2, 3, 4]),
        (r"data.text contains '\u0000'", [2]),
        (r"data.text starts with 'a\u0000'", [2]),
        ("data.text contains '😀'", [3]),
        ("data.far > 1e300", [4]),
        ("data.n == 3 or data.n == 1", [1, 3]),
    ],
)
def test_content_that_some_database_cannot_read_is_found_all_the_same(
    store: Store, where: str, kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql, "SIFT_S_MAX", 60.0)  # a look ends after 50 ms, which a loaded machine takes for one row
    append(
        store,
        draft("a", {"n": 1, "text": "plain"}),
        draft("a", {"n": 2, "text": "a\0b"}),
        draft("a", {"n": 3, "text": "😀"}),
        draft("a", {"n": 4, "far": 10**400}),
        draft("a", {"n": -5}),
    )

    wanted = selection("a", where=where)
    with store.write() as writer:
        assert [message.seq for message in writer.scan(wanted, 0, 10).messages] == kept
        assert writer.count(wanted, 0, 10) == len(kept)
        writer.append([draft("b")], NOW, DedupeWindow())  # the transaction goes on
    assert scanned(store, wanted) == kept


def test_counted_topics_mislead_no_scan(store: Store) -> None:
    """A store may know from its counts where a topic cannot be; what was counted, deleted or is new must not matter."""
    append(store, draft("old"), draft("a"), draft("gone"))
    append(store, *[draft("common")] * 55_000, draft("deep"), *[draft("common")] * 4_999)
    with store.write() as writer:
        while writer.fold_topic_counts(50_000):
            pass
    append(store, draft("gone"), draft("new"), draft("a"))
    with store.write() as writer:
        writer.delete_messages(writer.oldest(parse_pattern("gone"), 0, 1))

    topics = ("old", "a", "gone", "deep")
    seqs = {topic: scanned(store, selection(topic)) for topic in topics}
    assert seqs == {"old": [1], "a": [2, 60_006], "gone": [60_004], "deep": [55_004]}
    assert scanned(store, selection("new"), after=1) == [60_005]
    assert scanned(store, selection("none")) == scanned(store, selection("old"), after=1) == []
    with store.read() as reader:
        assert reader.scan(selection("none"), 0, 10, upto=55_000).scanned_to <= 55_000
        assert [kept.seq for kept in reader.oldest(parse_pattern("gone"), 0, 10)] == [60_004]
        assert [kept.seq for kept in reader.oldest(parse_pattern("a"), 2, 10)] == [60_006]
