"""Another process inserts with plain SQL; retention deletes messages and reports the gap to the subscription.

python examples/plain_sql_and_retention.py [directory]
"""

import subprocess
import sys
from pathlib import Path

import headwater

directory = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
path = directory / "plain_sql.db"


def sql(statement: str) -> subprocess.CompletedProcess[str]:
    """Any SQLite client works; `python -m apsw` is installed with Headwater."""
    return subprocess.run([sys.executable, "-m", "apsw", str(path), statement], capture_output=True, text=True)


with headwater.open(path) as log, log.subscribe("reader", "sensors.>") as subscription:
    sql("INSERT INTO messages (topic, data) VALUES ('sensors.attic', '{\"degrees\": 31}')")
    [message] = subscription.fetch(1, timeout=10)  # woken by the other process's commit
    print("from plain SQL:", message.seq, message.topic, message.data)
    message.ack()

    refused = sql("INSERT INTO messages (topic, data) VALUES ('sensors..attic', '{}')")
    print("a bad topic is refused there too:", refused.returncode != 0)
    print("by plain SQL:", sql("SELECT topic, json_extract(data, '$.degrees') FROM history").stdout.strip())

    @subscription.on_gap
    def tell(gap: headwater.Gap) -> None:
        print(f"lost to {gap.why}: {gap.count} messages, from {gap.from_seq} to {gap.to_seq}")

    log.retain("sensors.>", max_count=3)
    log.publish_many([("sensors.attic", {"degrees": degrees}) for degrees in range(10)])
    report = log.run_maintenance()  # the background does this once a minute
    print("pruned:", report.pruned)
    print("still there:", [message.seq for message in subscription.fetch()])

    log.retain("sensors.>", max_count=3, keep_unacked=True)
    log.publish_many([("sensors.attic", {"degrees": degrees}) for degrees in range(10)])
    log.run_maintenance()
    print("with keep_unacked, nothing unread goes:", len(subscription.fetch()))
    print("lost in all:", subscription.info().gaps)
