"""Tables and lines, into a pipe and on a terminal."""

import pytest

from headwater.cli.output import Column, Table, Text, cell_width, pairs, printable, table


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


def test_on_a_narrow_terminal_columns_of_names_are_shortened_first():
    shown = table("~topic", ">messages", "last")
    shown.add_row("orders.new.of.the.shop", "1,200", Text("late", "red"))
    shown.add_row("価格価格価格価格価格価格", "3", "now")
    assert list(shown.lines(30)) == [
        "topic           messages  last",
        "orders.new.of…     1,200  late",
        "価格価格価格…          3  now",
    ]
    assert all(cell_width(line) <= 30 for line in shown.lines(30))


def test_a_text_is_folded_between_its_words_in_its_column_or_under_its_row():
    shown = pairs([("why", "the file is on a disk that is full")])
    assert list(shown.lines(20)) == ["why  the file is on", "     a disk that is", "     full"]
    below = table("version", ">size", "+message")
    below.add_row("7", "1 B", "a long message that has its own lines")
    assert list(below.lines(24)) == [
        "version  size",
        "7         1 B",
        "    a long message that",
        "    has its own lines",
    ]


def test_styles_are_for_terminals_alone_and_take_no_columns():
    shown = table("name", ">n")
    shown.add_row(Text("a", "bold red"), "1")
    assert list(shown.lines()) == ["name  n", "a     1"]
    assert list(shown.lines(styled=True))[1] == "\x1b[1;31ma\x1b[0m     1"


def test_pairs_have_no_header():
    assert list(pairs([("log", "events.db"), ("last seq", "4")]).lines()) == ["log       events.db", "last seq  4"]
    assert list(Table([Column("")]).lines()) == [""]


@pytest.mark.parametrize(("text", "shown"), [("plain", "plain"), ("a\x1b[31mb", "a\\x1b[31mb"), ("a\nb\tc", "a\nb\tc")])
def test_control_characters_are_shown_not_sent(text: str, shown: str):
    assert printable(text) == shown
