"""What a subscription keeps of the messages of its topics: the entity filter (`from`, `to`), and the `where` condition.

**Regexes** come from outside and are in the dialect of RE2, whose searches take time in proportion to the text. RE2 has
no look-around and no backreferences. All stores search with `Regex`, so they agree to the letter.

**The entity filter** is `from` AND (`to` OR `broadcast`). A string matches exactly, a `/regex/` by search, a list if
any of its parts does. A message without `to` is a broadcast. A setting that is not given does not narrow the filter.

**The condition** is a safe little language over a message's fields:

    priority >= 5 and data.region == 'us-west'
    not (data.amount < 10 or data.tags[0] == "x")
    type in ['a', 'b'] and headers.tenant starts with 'ac' and data["odd key"] != null

    condition = all ("or" all)*
    all       = unary ("and" unary)*
    unary     = "not" unary | "(" condition ")" | comparison
    comparison = path [ ("==" | "!=") scalar
                      | ("<" | "<=" | ">" | ">=") (number | string)
                      | ("starts" "with" | "contains") string
                      | "in" "[" scalar ("," scalar)* "]" ]
    path      = field ( "." name | "[" index "]" | "[" string "]" )*

- A missing path is null. A bare path (`data.vip`) asks whether the value is true.
- `==`, `!=` and `in` keep types apart: '1' is not 1, true is not 1, but 1 is 1.0. An array or object equals nothing.
- `<`, `<=`, `>` and `>=` hold between two numbers or two strings (by code point), `starts with` and `contains` between
  two strings; otherwise they are false. `not` makes false true, always.

The tree has two kinds of leaves: `!=` is a negated equality, and a bare path is an equality with true. The SQL stores
translate the same tree, and `tests/stores/test_conditions.py` holds both equal. The rules make that possible: two truth
values, no conversion between types, missing is null.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Literal, NamedTuple, NoReturn, assert_never

import re2

from headwater.errors import InvalidFilterError, InvalidWhereError
from headwater.formats import is_unicode
from headwater.message import NAME_CHARS_MAX, NAMED_HEADERS

# --- regexes ----------------------------------------------------------------------------------------------------------

REGEX_CHARS_MAX = 256
REGEX_STEPS_MAX = 5_000  # of the compiled program; a search takes so many for each character at most
SEARCHED_CHARS_MAX = 2_048  # the beginning of a text, which is all that is searched
_MEMORY_BYTES = 128 * 1024
_COMPILED_KEPT = 1_024

_INSTEAD = {
    "(?=": "A look-ahead: match what follows as well",
    "(?!": "A negative look-ahead: name what is wanted, in a list",
    "(?<=": "A look-behind: match what comes before as well",
    "(?<!": "A negative look-behind: name what is wanted, in a list",
    "(?>": "An atomic group: use a plain one, (?:…)",
    "(?P": "A backreference: name what is wanted, in a list",
    "(?#": "A comment: leave it out",
    r"\Z": r"The end of the text is \z",
    r"\u": r"A character by its number is \x{…}",
}
_OPTIONS = re2.Options()
_OPTIONS.log_errors = False
_OPTIONS.max_mem = _MEMORY_BYTES
_OPTIONS.never_capture = True
_LITERAL = re2.Options()
_LITERAL.log_errors = False
_LITERAL.max_mem = _MEMORY_BYTES
_LITERAL.never_capture = True
_LITERAL.literal = True
_LITERAL.encoding = re2.Options.Encoding.LATIN1


class Regex:
    """Equal by its text. The compiled program is in a cache that all share, so that thousands of filters need little
    memory."""

    __slots__ = ("source",)

    def __init__(self, source: str) -> None:
        self.source = source

    def finds(self, text: str) -> bool:
        """Whether it matches anywhere in the text's beginning."""
        return _compiled(self.source).search(text[:SEARCHED_CHARS_MAX].encode(errors="replace")) is not None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Regex) and other.source == self.source

    def __hash__(self) -> int:
        return hash(self.source)


def parse_regex(source: str, where: str) -> Regex:
    if len(source) > REGEX_CHARS_MAX:
        raise InvalidFilterError(
            f"a regex of {len(source)} characters is longer than {REGEX_CHARS_MAX}",
            where=where,
            next="Shorten it, or split it into a list",
        )
    try:
        compiled = _compiled(source)
    except UnicodeEncodeError as exc:
        raise InvalidFilterError(
            "a regex holds half a surrogate pair", where=where, next="Write whole characters"
        ) from exc
    except re2.error as exc:
        why = exc.args[0].decode(errors="replace") if isinstance(exc.args[0], bytes) else str(exc)
        raise InvalidFilterError(
            f"not a regular expression that RE2 takes: {why}", where=where, next=_instead(why)
        ) from exc
    if compiled.programsize > REGEX_STEPS_MAX:
        raise InvalidFilterError(
            f"a regex of {compiled.programsize:,} steps is larger than {REGEX_STEPS_MAX:,}",
            where=where,
            next="Repeat less, as in .* instead of .{300}, or split it into a list",
        )
    return Regex(source)


def is_in(text: str, whole: str) -> bool:
    """Whether a large text holds another one. Python would search it without letting other threads run."""
    return _compiled_text(text).search(whole.encode(errors="surrogatepass")) is not None


@lru_cache(maxsize=_COMPILED_KEPT)
def _compiled_text(text: str) -> re2._Regexp:
    return re2._Regexp(text.encode(errors="surrogatepass"), _LITERAL)


@lru_cache(maxsize=_COMPILED_KEPT)
def _compiled(source: str) -> re2._Regexp:
    # Not by re2.compile, which keeps a cache of its own.
    return re2._Regexp(source.encode(), _OPTIONS)


def _instead(why: str) -> str:
    what = why.rpartition(": ")[2]
    if what in _INSTEAD:
        return _INSTEAD[what]
    if what.startswith("\\") and what[1:].isdigit():
        return "A backreference: name what is wanted, in a list"
    return "Correct it; the syntax is that of RE2"


# --- the entity filter ------------------------------------------------------------------------------------------------

ENTITIES_MAX = 64
REGEXES_MAX = 16  # of these, regexes

_HOW_TO_SPELL = "Give a name, a /regex/, or a list of those; without it all messages match."


@dataclass(frozen=True, slots=True)
class Matcher:
    """One name as it was spelled; `regex` is set if that spelling was a `/regex/`."""

    spelling: str
    regex: Regex | None = None

    def matches(self, entity: str) -> bool:
        return self.regex.finds(entity) if self.regex else entity == self.spelling


@dataclass(frozen=True, slots=True)
class EntityFilter:
    from_: tuple[Matcher, ...] | None = None
    to: tuple[Matcher, ...] | None = None
    broadcast: bool = False

    @property
    def has_regex(self) -> bool:
        return any(matcher.regex for matcher in (*(self.from_ or ()), *(self.to or ())))

    @property
    def is_everything(self) -> bool:
        return self.from_ is None and self.to is None and not self.broadcast

    def keeps(self, from_: str | None, to: str | None) -> bool:
        if self.from_ is not None and not _any_matches(self.from_, from_):
            return False
        if self.to is None and not self.broadcast:
            return True
        if to is None:
            return self.broadcast
        return self.to is not None and _any_matches(self.to, to)

    def to_json(self) -> dict[str, Any]:
        """Only what is set, as it was spelled; a list of one is written as its one part."""
        document: dict[str, Any] = {}
        if self.from_ is not None:
            document["from"] = _spelled(self.from_)
        if self.to is not None:
            document["to"] = _spelled(self.to)
        if self.broadcast:
            document["broadcast"] = True
        return document

    @classmethod
    def from_json(cls, document: object) -> EntityFilter:
        if not isinstance(document, dict):
            raise InvalidFilterError(
                f"a filter is an object, not {type(document).__name__}",
                where="filter",
                next='Write it like {"from": "admin", "broadcast": true}.',
            )
        unknown = [str(key) for key in document if key not in ("from", "to", "broadcast")]
        if unknown:
            raise InvalidFilterError(
                f"no such setting: {', '.join(unknown)}",
                where="filter",
                next="A filter has from, to and broadcast.",
            )
        return parse_entity_filter(
            from_=document.get("from"), to=document.get("to"), broadcast=document.get("broadcast", False)
        )


def parse_entity_filter(
    from_: str | list[str] | None = None, to: str | list[str] | None = None, broadcast: bool = False
) -> EntityFilter:
    if not isinstance(broadcast, bool):
        raise InvalidFilterError(
            f"broadcast is true or false, not {type(broadcast).__name__}",
            where="filter.broadcast",
            next="Set it to true to get messages without `to`.",
        )
    return EntityFilter(_parse_matchers(from_, "from"), _parse_matchers(to, "to"), broadcast)


def _parse_matchers(spelled: object, setting: str) -> tuple[Matcher, ...] | None:
    where = f"filter.{setting}"
    if spelled is None:
        return None
    if not isinstance(spelled, list | tuple):
        return (_parse_matcher(spelled, where),)
    if not spelled:
        raise InvalidFilterError("an empty list matches nothing", where=where, next=_HOW_TO_SPELL)
    if len(spelled) > ENTITIES_MAX:
        raise InvalidFilterError(
            f"{len(spelled)} entities are more than {ENTITIES_MAX}",
            where=where,
            next="Combine them, for example in one /regex/.",
        )
    if sum(map(_is_regex, spelled)) > REGEXES_MAX:
        raise InvalidFilterError(
            f"more than {REGEXES_MAX} regexes",
            where=where,
            next="Join them with | into fewer, or give names, which cost less",
        )
    return tuple(_parse_matcher(part, f"{where}[{index}]") for index, part in enumerate(spelled))


def _is_regex(spelling: object) -> bool:
    return isinstance(spelling, str) and len(spelling) > 2 and spelling.startswith("/") and spelling.endswith("/")


def _parse_matcher(spelling: object, where: str) -> Matcher:
    if not isinstance(spelling, str):
        raise InvalidFilterError(f"an entity is text, not {type(spelling).__name__}", where=where, next=_HOW_TO_SPELL)
    if spelling in ("", "//"):
        raise InvalidFilterError("it is empty", where=where, next=_HOW_TO_SPELL)
    if len(spelling) > NAME_CHARS_MAX + len("//"):
        raise InvalidFilterError(
            f"{len(spelling)} characters are more than the {NAME_CHARS_MAX} of a name", where=where, next=_HOW_TO_SPELL
        )
    if not is_unicode(spelling):
        raise InvalidFilterError("half a surrogate pair is not text", where=where, next=_HOW_TO_SPELL)
    if _is_regex(spelling):
        return Matcher(spelling, parse_regex(spelling[1:-1], where))
    return Matcher(spelling)


def _any_matches(matchers: tuple[Matcher, ...], entity: str | None) -> bool:
    return entity is not None and any(matcher.matches(entity) for matcher in matchers)


def _spelled(matchers: tuple[Matcher, ...]) -> str | list[str]:
    spellings = [matcher.spelling for matcher in matchers]
    return spellings[0] if len(spellings) == 1 else spellings


# --- the condition: tree and parser -----------------------------------------------------------------------------------

WHERE_CHARS_MAX = 2000
WHERE_DEPTH_MAX = 32
WHERE_TERMS_MAX = 64
ARRAY_INDEX_MAX = 999_999
INT64 = range(-(2**63), 2**63)

SCALAR_FIELDS = ("topic", *NAMED_HEADERS, "priority", "seq", "published_at", "size")
JSON_FIELDS = ("headers", "data")

Scalar = str | int | float | bool | None
Operator = Literal["<", "<=", ">", ">=", "starts with", "contains"]


@dataclass(frozen=True, slots=True)
class Path:
    """A field and the way into it: a name is a key of an object, a number an index of an array."""

    field: str
    steps: tuple[str | int, ...] = ()


@dataclass(frozen=True, slots=True)
class OneOf:
    path: Path
    values: tuple[Scalar, ...]


@dataclass(frozen=True, slots=True)
class Compare:
    path: Path
    operator: Operator
    value: str | int | float


@dataclass(frozen=True, slots=True)
class Not:
    term: Term


@dataclass(frozen=True, slots=True)
class And:
    terms: tuple[Term, ...]


@dataclass(frozen=True, slots=True)
class Or:
    terms: tuple[Term, ...]


Term = OneOf | Compare | Not | And | Or


def parse_path(text: str) -> Path:
    """A field on its own, such as `data.customer.id`: what an ordering key is read from."""
    if len(text) > WHERE_CHARS_MAX:
        raise InvalidWhereError(f"{len(text)} characters are more than {WHERE_CHARS_MAX}", next="Name a shorter path")
    return _Parser(text).whole_path()


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


_TOKEN = re.compile(
    r"""
    (?P<space>\s+)
  | (?P<word>[^\W\d]\w*)
  | (?P<number>-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)
  | (?P<string>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
  | (?P<symbol>==|!=|<=|>=|[<>()\[\],.])
    """,
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "/": "/", "\\": "\\", "'": "'", '"': '"'}
_CONSTANTS: dict[str, Scalar] = {"true": True, "false": False, "null": None}
_ORDERINGS: dict[str, Operator] = {"<": "<", "<=": "<=", ">": ">", ">=": ">="}
_MEANT = {"=": "==", "&": "and", "|": "or", "!": "not"}
_KEYWORDS = ("and", "or", "not", "in", "starts", "with", "contains", *_CONSTANTS)
_EXAMPLE = "Write it like: priority >= 5 and data.region == 'us-west'"
_PICTURE_CHARS = 30


def _refuse(text: str, at: int, why: str, next: str = _EXAMPLE) -> NoReturn:
    start = max(0, at - _PICTURE_CHARS)
    # One column per character, so that the caret stands under what it means.
    shown = re.sub(r"\s", " ", text[start : at + _PICTURE_CHARS])
    raise InvalidWhereError(why, where=f"where, at {at + 1}", next=f"{next}\n  {shown}\n  {' ' * (at - start)}^")


def _tokens(text: str) -> list[_Token]:
    tokens = []
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            _refuse_character(text, at)
        if found.lastgroup and found.lastgroup != "space":
            tokens.append(_Token(found.lastgroup, found.group(), at))
        at = found.end()
    return [*tokens, _Token("end", "", at)]


def _refuse_character(text: str, at: int) -> NoReturn:
    character = text[at]
    if character in "'\"":
        _refuse(text, at, "this string is never closed", f"End it with {character}")
    if character in _MEANT:
        _refuse(text, at, f"`{character}` has no meaning here", f"Perhaps you meant `{_MEANT[character]}`")
    _refuse(text, at, f"`{character}` has no meaning here")


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = _tokens(text)
        self._next = 0
        self._terms = 0

    def whole_condition(self) -> Term:
        condition = self._condition(depth=0)
        if self._token.kind != "end":
            self._expected("`and`, `or` or the end")
        return condition

    def whole_path(self) -> Path:
        path = self._path()
        if self._token.kind != "end":
            self._expected("the end")
        return path

    def _condition(self, depth: int) -> Term:
        terms = [self._all(depth)]
        while self._took("or"):
            terms.append(self._all(depth))
        return terms[0] if len(terms) == 1 else Or(tuple(terms))

    def _all(self, depth: int) -> Term:
        terms = [self._unary(depth)]
        while self._took("and"):
            terms.append(self._unary(depth))
        return terms[0] if len(terms) == 1 else And(tuple(terms))

    def _unary(self, depth: int) -> Term:
        if depth > WHERE_DEPTH_MAX:
            self._refuse(f"nested deeper than {WHERE_DEPTH_MAX}", "Drop parentheses or `not`s")
        if self._took("not"):
            return Not(self._unary(depth + 1))
        if self._took("("):
            inner = self._condition(depth + 1)
            self._take(")", "`and`, `or` or `)`")
            return inner
        return self._comparison()

    def _comparison(self) -> Term:
        self._terms += 1
        if self._terms > WHERE_TERMS_MAX:
            self._refuse(f"more than {WHERE_TERMS_MAX} terms", "`x in [..]` says many equalities as one term")
        path = self._path()
        if self._took("=="):
            return OneOf(path, (self._scalar(),))
        if self._took("!="):
            return Not(OneOf(path, (self._scalar(),)))
        if self._took("in"):
            return OneOf(path, self._list())
        if self._token.text in _ORDERINGS:
            return Compare(path, _ORDERINGS[self._advance().text], self._number_or_string())
        if self._took("contains"):
            return Compare(path, "contains", self._string())
        if self._took("starts"):
            self._take("with", "`with` after `starts`")
            return Compare(path, "starts with", self._string())
        return OneOf(path, (True,))

    def _path(self) -> Path:
        name = self._token
        if name.kind in ("number", "string") or name.text in _CONSTANTS:
            self._refuse("a value cannot come first", "Put the field on the left: priority >= 5")
        if name.kind != "word" or name.text in _KEYWORDS:
            self._expected("a field")
        if name.text not in SCALAR_FIELDS and name.text not in JSON_FIELDS:
            self._refuse(
                f"expected a field, found `{name.text}`",
                f"What is inside a message starts with data: data.{name.text}. "
                f"The other fields are {', '.join(SCALAR_FIELDS)} and headers",
            )
        self._advance()
        if name.text in SCALAR_FIELDS and self._token.text in (".", "["):
            self._refuse(f"`{name.text}` has nothing inside it", "Only data and headers have")
        steps = self._steps()
        # Whether no headers at all are null or {} is the store's business; a condition must not see it.
        if name.text == "headers" and (not steps or isinstance(steps[0], int)):
            self._expected("a header's name", "Name one: headers.tenant")
        return Path(name.text, steps)

    def _steps(self) -> tuple[str | int, ...]:
        steps: list[str | int] = []
        while True:
            if self._took("."):
                if self._token.kind != "word":
                    self._expected("a name", 'An odd name goes in brackets: data["odd name"]')
                steps.append(self._advance().text)
            elif self._took("["):
                steps.append(self._bracketed_step())
                self._take("]", "`]`")
            else:
                return tuple(steps)

    def _bracketed_step(self) -> str | int:
        if self._token.kind == "string":
            return self._string()
        if self._token.kind != "number" or not self._token.text.isdecimal():
            self._expected("an index or a quoted name", 'Like data.tags[0] or data["odd name"]')
        if int(self._token.text) > ARRAY_INDEX_MAX:
            self._refuse(f"an index beyond {ARRAY_INDEX_MAX}", "Name an earlier element")
        return int(self._advance().text)

    def _list(self) -> tuple[Scalar, ...]:
        self._take("[", "a list", "Like: type in ['a', 'b']")
        values = [self._scalar()]
        while self._took(","):
            values.append(self._scalar())
        self._take("]", "`,` or `]`")
        return tuple(values)

    def _scalar(self) -> Scalar:
        if self._token.text in _CONSTANTS:
            return _CONSTANTS[self._advance().text]
        return self._number_or_string("a number, a string, true, false or null")

    def _number_or_string(self, what: str = "a number or a string") -> str | int | float:
        if self._token.kind == "number":
            return self._number()
        return self._string(what)

    def _number(self) -> int | float:
        token = self._token
        number = int(token.text) if token.text.lstrip("-").isdecimal() else float(token.text)
        if isinstance(number, int) and number not in INT64:
            self._refuse("this integer needs more than 64 bits", f"Write it as a float: {token.text}.0")
        if number in (float("inf"), float("-inf")):
            self._refuse("this number is too large for a float", "The largest is about 1.8e308")
        self._advance()
        return number

    def _string(self, what: str = "a string") -> str:
        token = self._token
        if token.kind == "word" and token.text in (*SCALAR_FIELDS, *JSON_FIELDS):
            self._expected(what, "A field is compared with a fixed value, never with another field")
        if token.kind != "string":
            self._expected(what, "A string has quotes: 'like this'")
        plain = _ESCAPE.sub(self._unescaped, token.text[1:-1])
        try:
            # Joins the two halves of an escaped surrogate pair, and finds a half that stands alone.
            plain = plain.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            self._refuse("half a surrogate pair is not text", r"Write both halves: \ud83d\ude00")
        self._advance()
        return plain

    def _unescaped(self, escape: re.Match[str]) -> str:
        code = escape[1]
        if len(code) > 1:
            return chr(int(code[1:], 16))
        if code not in _ESCAPED:
            at = self._token.at + 1 + escape.start()
            _refuse(self._text, at, f"unknown escape `\\{code}`", r"A backslash itself is written \\")
        return _ESCAPED[code]

    @property
    def _token(self) -> _Token:
        return self._tokens[self._next]

    def _advance(self) -> _Token:
        token = self._token
        self._next += 1
        return token

    def _took(self, spelling: str) -> bool:
        if self._token.text != spelling:
            return False
        self._advance()
        return True

    def _take(self, spelling: str, what: str, next: str = _EXAMPLE) -> None:
        if not self._took(spelling):
            self._expected(what, next)

    def _expected(self, what: str, next: str = _EXAMPLE) -> NoReturn:
        found = f"`{self._token.text}`" if self._token.text else "the end"
        lower = self._token.text.lower()
        if lower != self._token.text and lower in _KEYWORDS:
            next = f"Keywords are lower case: `{lower}`"
        self._refuse(f"expected {what}, found {found}", next)

    def _refuse(self, why: str, next: str) -> NoReturn:
        _refuse(self._text, self._token.at, why, next)


# --- the condition: evaluation ----------------------------------------------------------------------------------------

FieldLookup = Callable[[str], object]
"""Gives a field's value by name; for `headers` and `data` the decoded JSON.

It is asked only for the fields that the condition names and reaches, so it should decode `data` when asked,
not before.
"""

_COMPARISONS: dict[Operator, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "starts with": str.startswith,
    "contains": lambda found, text: is_in(text, found) if len(found) > LARGE_CHARS else text in found,
}
LARGE_CHARS = 16_384
_FLOAT_BITS_MAX = 1024
_UINT64_MAX = 2**64 - 1


def term_holds(term: Term, lookup: FieldLookup) -> bool:
    match term:
        case OneOf(path, values):
            found = value_at(path, lookup)
            return any(_equal(found, value) for value in values)
        case Compare(path, comparison, value):
            found = value_at(path, lookup)
            return _same_kind(found, value) and _COMPARISONS[comparison](found, value)
        case Not(inner):
            return not term_holds(inner, lookup)
        case And(terms):
            return all(term_holds(each, lookup) for each in terms)
        case Or(terms):
            return any(term_holds(each, lookup) for each in terms)
        case _:
            assert_never(term)


def value_at(path: Path, lookup: FieldLookup) -> object:
    value = lookup(path.field)
    for step in path.steps:
        if isinstance(value, dict) and isinstance(step, str):
            value = value.get(step)
        elif isinstance(value, list) and isinstance(step, int) and step < len(value):
            value = value[step]
        else:
            return None
    if isinstance(value, int) and value not in INT64:
        return _float_as_sqlite_reads(value)
    return value


def _equal(found: object, value: Scalar) -> bool:
    if value is None or isinstance(value, bool):
        return found is value
    return _same_kind(found, value) and found == value


def _same_kind(found: object, value: str | int | float) -> bool:
    if isinstance(value, str):
        return isinstance(found, str)
    return isinstance(found, int | float) and not isinstance(found, bool)


def _float_as_sqlite_reads(number: int) -> float:
    """SQLite's JSON makes a double of it, from as many leading digits as are sure to fit a uint64."""
    sign = "-" if number < 0 else ""
    if number.bit_length() > _FLOAT_BITS_MAX:
        return float(f"{sign}inf")
    digits = str(abs(number))
    leading = digits[:20] if int(digits[:19]) < _UINT64_MAX // 10 else digits[:19]
    return float(f"{sign}{leading}e{len(digits) - len(leading)}")


@dataclass(frozen=True, slots=True)
class Where:
    text: str
    term: Term

    def holds(self, lookup: FieldLookup) -> bool:
        # Each field is asked for once at most: to decode `data` is the dearest part of a condition.
        return term_holds(self.term, cache(lookup))


def parse_where(text: str) -> Where:
    if not isinstance(text, str):
        raise InvalidWhereError(
            f"a condition is text, not {type(text).__name__}",
            where="where",
            next="Write it like: priority >= 5",
        )
    if len(text) > WHERE_CHARS_MAX:
        raise InvalidWhereError(
            f"{len(text)} characters are more than {WHERE_CHARS_MAX}",
            where="where",
            next="Shorten the condition, or split the subscription in two.",
        )
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise InvalidWhereError(
            "half a surrogate pair is not text",
            where=f"where, at {exc.start + 1}",
            next="Write the whole character.",
        ) from exc
    return Where(text, _Parser(text).whole_condition())
