-- The statements that are the same in SQLite and PostgreSQL; each store has the others in a file of its own. Each has a
-- name and a line of purpose. {json_rows}(…){as_json} is an array of arrays, as one JSON text; {among} compares a column
-- with many numbers that are one binding; {by_key} has SQLite search deliveries by key; {condition} is what conditions.py
-- compiled. In the stores' own files stand {last_seq}, {size}, {mark}, {counted_between} and {letter_id}.

-- :scan_seqs: the seqs of matching messages of a range, where the messages cannot be read all at once
SELECT seq FROM messages WHERE seq > ? AND seq <= ? AND {condition} ORDER BY seq LIMIT ?

-- :scan_times: the same with the time of publishing
SELECT {json_rows}(seq, published_at){as_json} FROM (
    SELECT seq, published_at FROM messages WHERE seq > ? AND seq <= ? AND {condition} ORDER BY seq LIMIT ?
) AS page

-- :scan_candidates: the same, and what topics and entities are matched by where SQL cannot do that alone
SELECT {json_rows}(seq, published_at, topic, "from", "to"){as_json} FROM (
    SELECT seq, published_at, topic, "from", "to" FROM messages
    WHERE seq > ? AND seq <= ? AND {condition} ORDER BY seq LIMIT ?
) AS page

-- :count: how many match in a seq range
SELECT count(*) FROM messages WHERE seq > ? AND seq <= ? AND {condition}

-- :at_or_after: the first message at or after a seq, for the search by time
SELECT seq, published_at FROM messages WHERE seq >= ? ORDER BY seq LIMIT 1

-- :last_published: the last message and its time
SELECT seq, published_at FROM messages ORDER BY seq DESC LIMIT 1

-- :first_published_since: the first message of a seq range that is not older than a time; looks at all before it
SELECT seq FROM messages WHERE seq BETWEEN ? AND ? AND published_at >= ? ORDER BY seq LIMIT 1

-- :bounds: the first and last seq in the log
SELECT coalesce(min(seq), 0), coalesce(max(seq), 0) FROM messages

-- :receipts: what a publisher has stored in a range of its numbers: the last one that begins at or below it, and those
-- that begin inside; receipts do not overlap
SELECT {json_rows}(number, length, seq){as_json} FROM (
    SELECT * FROM (
        SELECT number, length, seq FROM receipts WHERE publisher = ? AND number <= ? ORDER BY number DESC LIMIT 1
    ) AS last
    UNION ALL
    SELECT number, length, seq FROM receipts WHERE publisher = ? AND number > ? AND number < ?
) AS near

-- :forget_receipts: a publisher has heard of all below a number
DELETE FROM receipts WHERE publisher = ? AND number + length <= ?

-- :topic_counts: how far messages are counted, the last seq, the mark of a message, and the stored counts
SELECT (SELECT value FROM headwater WHERE name = 'counted_to'), ({last_seq}), ({mark}), (
    SELECT {json_rows}(topic, count, bytes, last_seq, last_published_at) ORDER BY topic{as_json} FROM topic_counts
)

-- :topic_max_seq: the same, with the last seq that is stored for one topic
SELECT (SELECT value FROM headwater WHERE name = 'counted_to'), ({last_seq}), ({mark}), (
    SELECT last_seq FROM topic_counts WHERE topic = ?
)

-- :topic_counts_between: counts of the messages of a seq range, and the mark of its last one
SELECT {json_rows}(topic, count, bytes, last_seq, last_published_at){as_json}, ({mark}) FROM ({counted_between}) AS counted

-- :fold_topic_counts: take a seq range into the stored counts
INSERT INTO topic_counts AS stored (topic, count, bytes, last_seq, last_published_at)
{counted_between}
ON CONFLICT (topic) DO UPDATE SET
    count = stored.count + excluded.count, bytes = stored.bytes + excluded.bytes, last_seq = excluded.last_seq,
    last_published_at = {greatest}(stored.last_published_at, excluded.last_published_at)

-- :last_pruned: where the last run ends that begins at or below a seq
SELECT to_seq FROM pruned WHERE from_seq <= ? ORDER BY from_seq DESC LIMIT 1

-- :forget_pruned: remove runs by their first seq
DELETE FROM pruned WHERE from_seq {among}

-- :sink_batch: the last batch that a sink published
SELECT batch FROM sinks WHERE sink = ?

-- :save_sink_batch: a sink published a batch
INSERT INTO sinks (sink, batch, at) VALUES (?, ?, ?)
ON CONFLICT (sink) DO UPDATE SET batch = excluded.batch, at = excluded.at

-- :delete_sink: forget a sink
DELETE FROM sinks WHERE sink = ?

-- :timings: how long deliveries took, from an hour on
SELECT {json_rows}(subscription, hour, stage, bucket, count) ORDER BY subscription, hour, stage, bucket{as_json}
FROM timings WHERE hour >= ?

-- :delete_timings: forget how long a subscription's deliveries took
DELETE FROM timings WHERE subscription = ?

-- :save_sample: note figures in a slot of the ring, in place of those that were there
INSERT INTO samples (step, slot, at, figures) VALUES (?, ?, ?, ?)
ON CONFLICT (step, slot) DO UPDATE SET at = excluded.at, figures = excluded.figures

-- :fact: one fact about the log
SELECT value FROM headwater WHERE name = ?

-- :set_fact: change a fact
INSERT INTO headwater (name, value) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value

-- :subscription: one subscription
SELECT {subscription_columns} FROM subscriptions WHERE id = ?

-- :subscriptions: all subscriptions
SELECT {subscription_columns} FROM subscriptions ORDER BY id

-- :subscription_columns: in the order of sql.record_of
id, spec, floor, delivered, settled, holder, fence, lease_until, created_at, active_at, acked, redelivered, buried

-- :save_subscription: insert a subscription or replace what changes of it
INSERT INTO subscriptions (id, pattern, mode, spec, created_at, floor, delivered, settled, holder, fence, lease_until,
    active_at, acked, redelivered, buried)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET
    pattern = excluded.pattern, mode = excluded.mode, spec = excluded.spec, floor = excluded.floor,
    delivered = excluded.delivered, settled = excluded.settled, holder = excluded.holder, fence = excluded.fence,
    lease_until = excluded.lease_until, active_at = excluded.active_at, acked = excluded.acked,
    redelivered = excluded.redelivered, buried = excluded.buried

-- :delete_subscription: remove a subscription
DELETE FROM subscriptions WHERE id = ?

-- :not_behind_its_key: only the first of the delivery rows of one key can be due: one in flight, else the lowest seq; only
-- a former dead letter can be lower than what is in flight
(key IS NULL OR NOT EXISTS (
    SELECT 1 FROM deliveries AS earlier {by_key}
    WHERE earlier.subscription = candidate.subscription AND earlier.key = candidate.key
        AND earlier.seq < candidate.seq AND (candidate.token = 0 OR earlier.token > 0)
) AND (dead_letter IS NULL OR token > 0 OR NOT EXISTS (
    SELECT 1 FROM deliveries AS later {by_key}
    WHERE later.subscription = candidate.subscription AND later.key = candidate.key
        AND later.seq > candidate.seq AND later.token > 0
)))

-- :next_due_ms: when the earliest delivery row becomes due, not counting those behind another of their key
SELECT due_at FROM deliveries AS candidate WHERE subscription = ? AND {which} AND {not_behind_its_key}
ORDER BY due_at LIMIT 1

-- :delivery_counts: rows in flight, rows waiting, and the first of them
SELECT count(*) FILTER (WHERE token > 0), count(*) FILTER (WHERE token = 0), min(seq)
FROM deliveries WHERE subscription = ? AND seq <= ?

-- :clear_deliveries: remove all delivery rows of a subscription
DELETE FROM deliveries WHERE subscription = ?

-- :count_dead_letters: the most frequent values of a column; {column} is one of count_dead_letters' own
SELECT {json_rows}(value, count){as_json} FROM (
    SELECT {column} AS value, count(*) AS count FROM dead_letters WHERE {condition}
    GROUP BY value ORDER BY count DESC, value LIMIT ?
) AS counted

-- :group_dead_letters: the largest groups of dead letters that failed alike; {line} is the first line of an error
SELECT {json_rows}(subscription, reason, handler, line, count, redriving, first, last, id){as_json} FROM (
    SELECT subscription, reason, coalesce(handler, '') AS handler, coalesce({line}, '') AS line, count(*) AS count,
        sum(CAST(redriving AS integer)) AS redriving, min(died_at) AS first, max(died_at) AS last, max(id) AS id
    FROM dead_letters WHERE {condition} GROUP BY 1, 2, 3, 4 ORDER BY 5 DESC, 9 DESC LIMIT ?
) AS grouped

-- :save_dead_letter: store a dead letter or replace it
INSERT INTO dead_letters (id, subscription, seq, topic, type, reason, attempts, died_at, error, stack, handler,
    redrives, redriving, redrive_error, message)
VALUES ({letter_id}, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET
    subscription = excluded.subscription, seq = excluded.seq, topic = excluded.topic, type = excluded.type,
    reason = excluded.reason, attempts = excluded.attempts, died_at = excluded.died_at, error = excluded.error,
    stack = excluded.stack, handler = excluded.handler, redrives = excluded.redrives, redriving = excluded.redriving,
    redrive_error = excluded.redrive_error, message = excluded.message
RETURNING id

-- :remove_dead_letters: remove dead letters by id
DELETE FROM dead_letters WHERE id {among}

-- :end_redrives: letters on their way again no longer are
UPDATE dead_letters SET redriving = FALSE, redrive_error = ? WHERE subscription = ? AND redriving

-- :add_gap: record a gap
INSERT INTO gaps (subscription, from_seq, to_seq, count, why, at) VALUES (?, ?, ?, ?, ?, ?)

-- :gaps: gaps not yet reported
SELECT subscription, from_seq, to_seq, count, why, at FROM gaps WHERE subscription = ? AND told = FALSE ORDER BY number

-- :gap_total: messages lost to gaps
SELECT CAST(coalesce(sum(count), 0) AS bigint) FROM gaps WHERE subscription = ?

-- :mark_gaps_reported: they have been reported
UPDATE gaps SET told = TRUE WHERE subscription = ? AND told = FALSE

-- :delete_gaps: forget the gaps of a subscription
DELETE FROM gaps WHERE subscription = ?

-- :retention: all retention policies
SELECT pattern, dialect, limits FROM retention ORDER BY pattern, dialect

-- :set_retention: add or replace a retention policy
INSERT INTO retention (pattern, dialect, limits) VALUES (?, ?, ?)
ON CONFLICT (pattern, dialect) DO UPDATE SET limits = excluded.limits

-- :remove_retention: drop a retention policy
DELETE FROM retention WHERE pattern = ? AND dialect = ?

-- :lease: the holder of a resource
SELECT owner, fence, until FROM leases WHERE resource = ?

-- :leases: leases whose resource begins with a text
SELECT resource, owner, fence, until FROM leases WHERE substr(resource, 1, length(?)) = ? ORDER BY resource

-- :save_lease: write a lease down
INSERT INTO leases (resource, owner, fence, until) VALUES (?, ?, ?, ?)
ON CONFLICT (resource) DO UPDATE SET owner = excluded.owner, fence = excluded.fence, until = excluded.until

-- :delete_lease: remove a lease
DELETE FROM leases WHERE resource = ?
