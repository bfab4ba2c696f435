"""Where files lie."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.pipeline.lake.layout import file_name, place_of, table_directory, topic_prefix


@pytest.mark.parametrize(
    ("topic", "prefix"), [("orders.new", "orders"), ("orders", "orders"), ("x" * 40 + ".y", "x" * 32)]
)
def test_the_prefix_is_the_first_token(topic: str, prefix: str) -> None:
    assert topic_prefix(topic) == prefix


def test_a_prefix_cannot_leave_its_directory() -> None:
    assert place_of("bronze.messages", "2026-03-01", "../../etc") == (
        "bronze/messages/day=2026-03-01/topic_prefix=%2E%2E%2F%2E%2E%2Fetc"
    )


@given(st.text(max_size=32))
def test_a_place_has_four_parts_whatever_the_prefix(prefix: str) -> None:
    parts = place_of("bronze.messages", "2026-03-01", prefix).split("/")
    assert len(parts) == 4
    assert "\0" not in parts[3]


def test_two_files_of_the_same_range_have_two_names() -> None:
    assert file_name(1, 9) != file_name(1, 9)


@pytest.mark.parametrize("table", ["bronze", "../x.y", "bronze.a/b", "bronze..x"])
def test_a_table_is_named_by_words(table: str) -> None:
    with pytest.raises(ValueError, match="no table"):
        table_directory(table)
