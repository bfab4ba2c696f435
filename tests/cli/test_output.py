"""Tables and lines, into a pipe and on a terminal."""

import io

import pytest
from rich.console import Console

from headwater.cli.output import Column, Table, Text, pairs, printable, table


def on_terminal(shown: object) -> list[str]:
    screen = io.StringIO()
    Console(file=screen, width=60, color_system=None).print(shown)
    return [line.rstrip() for line in screen.getvalue().splitlines()]


def filled() -> Table:
    shown = table("~topic", ">messages", "last")
    shown.add_row("orders.new", "1,200", Text("late", "red"))
    shown.add_row("価格", "3", Text.assemble(("a", "bold"), "b\nc"))
    return shown


def test_columns_into_a_pipe_are_aligned_and_have_no_trailing_blanks():
    assert list(filled().lines()) == [
        "topic       messages  last",
        "orders.new     1,200  late",
        "価格               3  ab",
        "                      c",
    ]


def test_a_pipe_gets_the_same_columns_as_a_terminal():
    assert [line.split() for line in on_terminal(filled())] == [line.split() for line in filled().lines()]


def test_pairs_have_no_header():
    assert list(pairs([("log", "events.db"), ("last seq", "4")]).lines()) == ["log       events.db", "last seq  4"]
    assert list(Table([Column("")]).lines()) == [""]


@pytest.mark.parametrize(("text", "shown"), [("plain", "plain"), ("a\x1b[31mb", "a\\x1b[31mb"), ("a\nb\tc", "a\nb\tc")])
def test_control_characters_are_shown_not_sent(text: str, shown: str):
    assert printable(text) == shown
