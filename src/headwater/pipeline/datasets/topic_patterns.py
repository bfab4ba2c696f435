"""Which topics a pattern means, in SQL: patterns that stand in a column cannot be parsed in Python first."""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as F

_TOKEN = r"(?:^|\.)[^.]+"
_TOKEN_BEGIN = r"(?:^|\.)"


def pattern_regex(pattern: Column, dialect: Column) -> Column:
    """A regular expression (of Java) that finds the same topics as `topics.parse_pattern(pattern, dialect)` matches."""
    is_nats = dialect == "nats"

    def token_regex(token: Column) -> Column:
        return (
            F.when(token == "*", F.lit(_TOKEN))
            .when((token == ">") & is_nats, F.lit(f"(?:{_TOKEN})+"))
            .when((token == "#") & ~is_nats, F.lit(f"(?:{_TOKEN})*"))
            .otherwise(F.concat(F.lit(_TOKEN_BEGIN), _literal(token)))
        )

    return F.concat(F.lit("^"), F.array_join(F.transform(F.split(pattern, r"\."), token_regex), ""), F.lit("$"))


def _literal(token: Column) -> Column:
    return F.regexp_replace(token, r"([\\^$.|?*+()\[\]{}#&~-])", r"\\$1")
