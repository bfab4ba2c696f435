"""The names of the lake's tables beside bronze."""

SILVER = "silver.messages"
QUARANTINE = "silver.quarantine"
GIVEN_IDS = "silver.given_ids"
GOLD_BY_DAY = ("volume", "traffic", "replication")
GOLD_WHOLE = ("latency", "lag", "dead_letters", "retry_storms", "forecast")
GOLD = (*GOLD_BY_DAY, *GOLD_WHOLE)
GOLD_MARK = "gold"
