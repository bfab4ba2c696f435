"""Topics and the patterns that choose among them.

A topic names what a message is about (`orders.new`). A pattern says which topics a subscription, a retention
policy or a forwarder wants: one meaning, two spellings (NATS and AMQP). A trie answers which patterns match a topic,
for many patterns at once; `covers` answers whether one pattern allows all that another asks for. Everything
here is pure: text in, answers out.
"""

from headwater.topics.pattern import Dialect, Part, Pattern, Wildcard, covers, overlaps, parse_pattern
from headwater.topics.topic import TOPIC_BYTES_MAX, TOPIC_TOKENS_MAX, check_topic
from headwater.topics.trie import TopicTrie

__all__ = [
    "TOPIC_BYTES_MAX",
    "TOPIC_TOKENS_MAX",
    "Dialect",
    "Part",
    "Pattern",
    "TopicTrie",
    "Wildcard",
    "check_topic",
    "covers",
    "overlaps",
    "parse_pattern",
]
