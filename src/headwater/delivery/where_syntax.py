"""The `where` condition as text and as a tree: names, tokens, parser.

    condition = all ("or" all)*
    all       = unary ("and" unary)*
    unary     = "not" unary | "(" condition ")" | comparison
    comparison = path [ ("==" | "!=") scalar
                      | ("<" | "<=" | ">" | ">=") (number | string)
                      | ("starts" "with" | "contains") string
                      | "in" "[" scalar ("," scalar)* "]" ]
    path      = field ( "." name | "[" index "]" | "[" string "]" )*

The tree has two kinds of leaves only: `!=` is a negated equality and a bare path is an equality with true.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple, NoReturn

from headwater.errors import InvalidWhere

WHERE_CHARS_MAX = 2000
WHERE_DEPTH_MAX = 32
WHERE_TERMS_MAX = 64
ARRAY_INDEX_MAX = 999_999
INT64 = range(-(2**63), 2**63)

SCALAR_FIELDS = (
    "topic", "type", "version", "from", "to", "reply_to", "correlation_id", "content_type", "traceparent",
    "priority", "seq", "published_at", "size",
)  # fmt: skip
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


def parse_term(text: str) -> Term:
    return _Parser(text).whole_condition()


def parse_path(text: str) -> Path:
    """A field on its own, such as `data.customer.id`: what an ordering key is read from."""
    if len(text) > WHERE_CHARS_MAX:
        raise InvalidWhere(f"{len(text)} characters are more than {WHERE_CHARS_MAX}", next="Name a shorter path")
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
    raise InvalidWhere(why, where=f"where, at {at + 1}", next=f"{next}\n  {shown}\n  {' ' * (at - start)}^")


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
