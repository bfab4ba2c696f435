-- Each query has a name and a line of purpose. {message} is one row of `messages` (as m) written as a JSON array in the
-- field order of message.Message; {condition} is what conditions.py compiled. Batches travel as one JSON text, in and
-- out, so that a statement is one step: Python's interpreter lock changes hands once, not once a row.

-- :message: a message row as JSON text; the rare fields only where `checked` does not say that there are none
format('[%d,%s,%s,%d,%d,', m.seq, json_quote(m.topic), m.data, m.published_at, octet_length(m.data))
|| iif(
    m.checked = 1,
    format('%d]', ?1),
    iif(m.id IS NULL, ?1, json_quote(m.id)) || ',' || {extras_json} || ']'
)

-- :last_seq: the highest seq ever given out
SELECT coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'messages'), 0)

-- :scan: matching messages of a seq range, in order
SELECT '[' || group_concat({message}) || ']'
FROM (SELECT * FROM messages WHERE seq > ? AND seq <= ? AND {condition} ORDER BY seq LIMIT ?) AS m

-- :messages: messages by seq
SELECT '[' || group_concat({message}) || ']'
FROM messages AS m WHERE m.seq IN (SELECT value FROM json_each(?))

-- :heads: the same without data and free headers
SELECT json_group_array(json_array(
    seq, topic, NULL, published_at, octet_length(data), coalesce(id, ?), {extras_but_headers}
)) FROM messages WHERE seq IN (SELECT value FROM json_each(?))

-- :scan_seqs: the same without the messages, where they cannot be read all at once
SELECT seq FROM messages WHERE seq > ? AND seq <= ? AND {condition} ORDER BY seq LIMIT ?

-- :scan_times: the same with nothing but the time of publishing
SELECT json_group_array(json_array(seq, published_at)) FROM (
    SELECT seq, published_at FROM messages WHERE seq > ? AND seq <= ? AND {condition} ORDER BY seq LIMIT ?
)

-- :scan_candidates: the same, and what topics and entities are matched by where SQL cannot do that alone
SELECT json_group_array(json_array(seq, published_at, topic, "from", "to")) FROM (
    SELECT seq, published_at, topic, "from", "to" FROM messages
    WHERE seq > ? AND seq <= ? AND {condition} ORDER BY seq LIMIT ?
)

-- :candidates: messages of a seq range that may be wanted, and whether their content is known to fit
SELECT seq, CAST(topic AS BLOB), CAST("from" AS BLOB), CAST("to" AS BLOB), octet_length(data), published_at, {judged}
FROM messages WHERE seq > ? AND seq <= ? AND {condition} ORDER BY seq {direction} LIMIT ?

-- :columns: one message, column by column, the payload as bytes
SELECT seq, CAST(topic AS BLOB), CAST(data AS BLOB), published_at, size, coalesce(id, ?), {extras_raw}
FROM messages WHERE seq = ?

-- :oldest: what retention looks at, in seq order
SELECT json_group_array(json_array(seq, topic, size, published_at))
FROM (
    SELECT seq, topic, {size} AS size, published_at FROM messages WHERE seq > ? AND seq <= ? AND {condition} ORDER BY seq LIMIT ?
)

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

-- :distinct_topics: the topics published to in a seq range
SELECT json_group_array(topic) FROM (SELECT DISTINCT topic FROM messages WHERE seq > ? AND seq <= ?)

-- :insert_plain: a message with nothing but topic and data; repeated for a batch
INSERT INTO messages (seq, topic, data, published_at, checked) VALUES

-- :publish_at_once: messages with nothing but topic and data, published now by SQLite's clock; the last one's seq
INSERT INTO messages (topic, data, published_at, checked)
SELECT column1, column2, CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER), 1
FROM (VALUES {rows});
SELECT last_insert_rowid()

-- :insert_full: a message with all its fields; repeated for a batch
INSERT INTO messages (seq, topic, data, published_at, checked, id, {extras}) VALUES

-- :known_ids: which of the given scoped ids are remembered
SELECT scoped_id, seq, published_at FROM remembered_ids WHERE scoped_id IN (SELECT value FROM json_each(?))

-- :remember_ids: remember ids, forgetting an earlier message of the same topic and id
INSERT OR REPLACE INTO remembered_ids (seq, scoped_id, published_at)
SELECT value, key, ? FROM json_each(?)

-- :forget_ids: drop ids outside the dedupe window
DELETE FROM remembered_ids
WHERE seq IN (SELECT seq FROM remembered_ids WHERE seq <= ? OR published_at < ? ORDER BY seq LIMIT ?)

-- :receipts: what a publisher has stored, from below a number down
SELECT number, length, seq FROM receipts WHERE publisher = ? AND number < ? ORDER BY number DESC

-- :add_receipt: note what numbers became which seqs
INSERT OR REPLACE INTO receipts (publisher, number, length, seq, at) VALUES (?, ?, ?, ?, ?)

-- :forget_receipts: a publisher has heard of all below a number
DELETE FROM receipts WHERE publisher = ? AND number + length <= ?

-- :forget_old_receipts: drop what no publisher will ask for any more
DELETE FROM receipts
WHERE (publisher, number) IN (SELECT publisher, number FROM receipts WHERE at < ? LIMIT ?)

-- :topic_counts: how far messages are counted, the last seq, the mark of a message, and the stored counts
SELECT (SELECT value FROM headwater WHERE name = 'counted_to'), ({last_seq}), ({mark}), (
    SELECT json_group_array(json_array(topic, count, bytes, last_seq, last_published_at))
    FROM (SELECT * FROM topic_counts ORDER BY topic)
)

-- :topic_max_seq: the same, with the last seq that is stored for one topic
SELECT (SELECT value FROM headwater WHERE name = 'counted_to'), ({last_seq}), ({mark}), (
    SELECT last_seq FROM topic_counts WHERE topic = ?
)

-- :topic_counts_between: counts of the messages of a seq range, and the mark of its last one
SELECT json_group_array(json_array(topic, count, bytes, last_seq, last_published_at)), ({mark}) FROM ({counted_between})

-- :counted_between: the messages of a seq range by topic; the LIMIT keeps SQLite from sorting them with their data
SELECT topic, count(*) AS count, sum(size) AS bytes, max(seq) AS last_seq, max(published_at) AS last_published_at
FROM (SELECT topic, {size} AS size, seq, published_at FROM messages WHERE seq > ? AND seq <= ? LIMIT -1) GROUP BY topic

-- :size: how many bytes the data of a message has; unlike the column `size` it does not load them
octet_length(data)

-- :mark: what tells a message from another one that has the same seq after a restore
SELECT published_at || ' ' || topic FROM messages WHERE seq = ?

-- :fold_topic_counts: take a seq range into the stored counts
INSERT INTO topic_counts (topic, count, bytes, last_seq, last_published_at)
{counted_between}
ON CONFLICT (topic) DO UPDATE SET
    count = count + excluded.count, bytes = bytes + excluded.bytes, last_seq = excluded.last_seq,
    last_published_at = max(last_published_at, excluded.last_published_at)

-- :uncount: take deleted messages off the stored counts
UPDATE topic_counts SET count = topic_counts.count - gone.count, bytes = topic_counts.bytes - gone.bytes
FROM (SELECT value ->> 0 AS topic, value ->> 1 AS count, value ->> 2 AS bytes FROM json_each(?)) AS gone
WHERE topic_counts.topic = gone.topic

-- :present: count and bytes by topic of those of the given seqs that exist
SELECT json_group_array(json_array(topic, count, bytes)) FROM (
    SELECT topic, count(*) AS count, sum(size) AS bytes FROM (
        SELECT topic, {size} AS size FROM messages WHERE seq IN (SELECT value FROM json_each(?)) LIMIT -1
    ) GROUP BY topic
)

-- :present_seqs: those of the given seqs that exist
SELECT json_group_array(seq) FROM (
    SELECT seq FROM messages WHERE seq IN (SELECT value FROM json_each(?)) ORDER BY seq
)

-- :delete_messages: remove messages by seq
DELETE FROM messages WHERE seq IN (SELECT value FROM json_each(?))

-- :pruned: runs of deleted seqs that overlap a range, clipped to it; one run at most reaches into it from below
SELECT json_group_array(json_array(max(from_seq, ?1), min(to_seq, ?2))) FROM (
    SELECT from_seq, to_seq FROM pruned
    WHERE from_seq BETWEEN coalesce((SELECT max(from_seq) FROM pruned WHERE from_seq <= ?1), ?1) AND ?2
        AND to_seq >= ?1 AND ?1 <= ?2
    ORDER BY from_seq
)

-- :last_pruned: where the last run ends that begins at or below a seq
SELECT to_seq FROM pruned WHERE from_seq <= ? ORDER BY from_seq DESC LIMIT 1

-- :pruned_beside: runs that end at one of the first seqs, or begin at one of the second
SELECT json_group_array(json_array(from_seq, to_seq)) FROM (
    SELECT stored.from_seq, stored.to_seq FROM json_each(?1) AS ends CROSS JOIN pruned AS stored
    WHERE stored.from_seq = (SELECT max(from_seq) FROM pruned WHERE from_seq <= ends.value)
        AND stored.to_seq = ends.value
    UNION
    SELECT from_seq, to_seq FROM pruned WHERE from_seq IN (SELECT value FROM json_each(?2))
)

-- :forget_pruned: remove runs by their first seq
DELETE FROM pruned WHERE from_seq IN (SELECT value FROM json_each(?))

-- :add_pruned: a run of deleted seqs, or a longer one that begins where a stored one does; repeated for a batch
INSERT OR REPLACE INTO pruned (from_seq, to_seq) VALUES

-- :sink_batch: the last batch that a sink published
SELECT batch FROM sinks WHERE sink = ?

-- :save_sink_batch: a sink published a batch
INSERT OR REPLACE INTO sinks (sink, batch, at) VALUES (?, ?, ?)

-- :delete_sink: forget a sink
DELETE FROM sinks WHERE sink = ?

-- :timings: how long deliveries took, from an hour on; the plus leaves the order to a sort, so that the index on hours
-- finds the few of the last ones
SELECT json_group_array(json_array(subscription, hour, stage, bucket, count))
FROM (SELECT * FROM timings WHERE hour >= ? ORDER BY +subscription, hour, stage, bucket)

-- :add_timings: count further deliveries in, of subscriptions that are still there
INSERT INTO timings (subscription, hour, stage, bucket, count)
SELECT value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4 FROM json_each(?)
WHERE value ->> 0 IN (SELECT id FROM subscriptions)
ON CONFLICT (subscription, hour, stage, bucket) DO UPDATE SET count = count + excluded.count

-- :forget_old_timings: drop the histograms of hours long ago
DELETE FROM timings WHERE (subscription, hour, stage, bucket) IN (
    SELECT subscription, hour, stage, bucket FROM timings WHERE hour < ? LIMIT ?
)

-- :delete_timings: forget how long a subscription's deliveries took
DELETE FROM timings WHERE subscription = ?

-- :file_bytes: the size of the database file, free pages included
SELECT page_count * page_size FROM pragma_page_count, pragma_page_size

-- :samples: the figures over time of one step, from a time on
SELECT json_group_array(json(figures)) FROM (SELECT figures FROM samples WHERE step = ? AND at >= ? ORDER BY at)

-- :save_sample: note figures in a slot of the ring, in place of those that were there
INSERT OR REPLACE INTO samples (step, slot, at, figures) VALUES (?, ?, ?, ?)

-- :fact: one fact about the log
SELECT value FROM headwater WHERE name = ?

-- :set_fact: change a fact
INSERT OR REPLACE INTO headwater (name, value) VALUES (?, ?)

-- :subscription: one subscription
SELECT id, spec, floor, delivered, settled, holder, fence, lease_until, created_at, active_at, acked, redelivered, buried
FROM subscriptions WHERE id = ?

-- :subscriptions: all subscriptions
SELECT id, spec, floor, delivered, settled, holder, fence, lease_until, created_at, active_at, acked, redelivered, buried
FROM subscriptions ORDER BY id

-- :owned_subscriptions: how many of them belong to an owner
SELECT count(*) FROM subscriptions WHERE spec ->> 'owner' = ?

-- :save_subscription: insert a subscription or replace what changes of it
INSERT INTO subscriptions (id, pattern, mode, spec, floor, delivered, settled, holder, fence, lease_until, created_at,
    active_at, acked, redelivered, buried)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET
    pattern = excluded.pattern, mode = excluded.mode, spec = excluded.spec, floor = excluded.floor,
    delivered = excluded.delivered, settled = excluded.settled, holder = excluded.holder, fence = excluded.fence,
    lease_until = excluded.lease_until, active_at = excluded.active_at, acked = excluded.acked,
    redelivered = excluded.redelivered, buried = excluded.buried

-- :delete_subscription: remove a subscription
DELETE FROM subscriptions WHERE id = ?

-- :due: claimable delivery rows with their messages; of one key only the first
SELECT '[' || group_concat(
    '[[' || d.seq || ',' || d.attempts || ',' || d.due_at || ',' || d.token || ',' || d.priority || ','
    || json_quote(d.key) || ',' || json_quote(d.dead_letter) || '],'
    || iif(m.seq IS NULL, 'null', {message}) || ']'
) || ']'
FROM (
    SELECT * FROM deliveries AS candidate
    WHERE subscription = ? AND due_at <= ? AND {which} AND (key IS NULL OR NOT EXISTS (
        SELECT 1 FROM deliveries AS earlier
        WHERE earlier.subscription = candidate.subscription AND earlier.key = candidate.key
            AND earlier.seq < candidate.seq
    ))
    ORDER BY {order} LIMIT ?
) AS d LEFT JOIN messages AS m ON m.seq = d.seq

-- :due_seqs: the same without the messages, where they cannot be read all at once
SELECT seq FROM deliveries AS candidate
WHERE subscription = ? AND due_at <= ? AND {which} AND (key IS NULL OR NOT EXISTS (
    SELECT 1 FROM deliveries AS earlier
    WHERE earlier.subscription = candidate.subscription AND earlier.key = candidate.key
        AND earlier.seq < candidate.seq
))
ORDER BY {order} LIMIT ?

-- :next_due_ms: when the earliest delivery row becomes due, not counting those behind another of their key
SELECT min(due_at) FROM deliveries AS candidate
WHERE subscription = ? AND {which} AND (key IS NULL OR NOT EXISTS (
    SELECT 1 FROM deliveries AS earlier
    WHERE earlier.subscription = candidate.subscription AND earlier.key = candidate.key
        AND earlier.seq < candidate.seq
))

-- :deliveries: delivery rows by seq
SELECT json_group_array(json_array(seq, attempts, due_at, token, priority, key, dead_letter)) FROM deliveries
WHERE subscription = ? AND seq IN (SELECT value FROM json_each(?))

-- :deliveries_by: delivery rows by token
SELECT json_group_array(json_array(seq, attempts, due_at, token, priority, key, dead_letter)) FROM deliveries
WHERE subscription = ? AND token = ?

-- :delivery_counts: rows in flight, rows waiting, and the first of them
SELECT coalesce(sum(token > 0), 0), coalesce(sum(token = 0), 0), min(seq)
FROM deliveries WHERE subscription = ? AND seq <= ?

-- :leased_seqs: seqs of a range under a live lease
SELECT json_group_array(DISTINCT seq) FROM deliveries WHERE seq BETWEEN ? AND ? AND token > 0 AND due_at > ?

-- :put_deliveries: insert delivery rows that differ in their seq alone, or replace them
INSERT OR REPLACE INTO deliveries (subscription, attempts, due_at, token, priority, key, dead_letter, seq)
SELECT ?, ?, ?, ?, ?, ?, ?, value FROM json_each(?)

-- :end_leases: make deliveries in flight due
UPDATE deliveries SET due_at = ? WHERE subscription = ? AND token > 0 AND due_at > ?

-- :remove_deliveries: remove delivery rows by seq
DELETE FROM deliveries WHERE subscription = ? AND seq IN (SELECT value FROM json_each(?))

-- :clear_deliveries: remove all delivery rows of a subscription
DELETE FROM deliveries WHERE subscription = ?

-- :dead_letters: dead letters above an id
SELECT id, subscription, reason, attempts, died_at, error, stack, handler, redrives, redriving, redrive_error, message
FROM dead_letters WHERE id > ? AND {condition} ORDER BY id

-- :count_dead_letters: the most frequent values of a column; {column} is one of count_dead_letters' own
SELECT json_group_array(json_array(value, count)) FROM (
    SELECT {column} AS value, count(*) AS count FROM dead_letters WHERE {condition}
    GROUP BY value ORDER BY count DESC, value LIMIT ?
)

-- :group_dead_letters: the largest groups of dead letters that failed alike; {line} is the first line of an error
SELECT json_group_array(json_array(subscription, reason, handler, line, count, redriving, first, last, id)) FROM (
    SELECT subscription, reason, coalesce(handler, '') AS handler, coalesce({line}, '') AS line, count(*) AS count,
        sum(redriving) AS redriving, min(died_at) AS first, max(died_at) AS last, max(id) AS id
    FROM dead_letters WHERE {condition} GROUP BY 1, 2, 3, 4 ORDER BY 5 DESC, 9 DESC LIMIT ?
)

-- :save_dead_letter: store a dead letter or replace it
INSERT OR REPLACE INTO dead_letters (id, subscription, seq, topic, type, reason, attempts, died_at, error, stack, handler,
    redrives, redriving, redrive_error, message)
VALUES (nullif(?, 0), ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)

-- :remove_dead_letters: remove dead letters by id
DELETE FROM dead_letters WHERE id IN (SELECT value FROM json_each(?))

-- :end_redrives: letters on their way again no longer are
UPDATE dead_letters SET redriving = 0, redrive_error = ? WHERE subscription = ? AND redriving

-- :add_gap: record a gap
INSERT INTO gaps (subscription, from_seq, to_seq, count, why, at) VALUES (?, ?, ?, ?, ?, ?)

-- :gaps: gaps not yet reported
SELECT subscription, from_seq, to_seq, count, why, at FROM gaps WHERE subscription = ? AND told = 0 ORDER BY number

-- :gap_total: messages lost to gaps
SELECT coalesce(sum(count), 0) FROM gaps WHERE subscription = ?

-- :mark_gaps_reported: they have been reported
UPDATE gaps SET told = 1 WHERE subscription = ? AND told = 0

-- :delete_gaps: forget the gaps of a subscription
DELETE FROM gaps WHERE subscription = ?

-- :retention: all retention policies
SELECT pattern, dialect, limits FROM retention ORDER BY pattern, dialect

-- :set_retention: add or replace a retention policy
INSERT OR REPLACE INTO retention (pattern, dialect, limits) VALUES (?, ?, ?)

-- :remove_retention: drop a retention policy
DELETE FROM retention WHERE pattern = ? AND dialect = ?

-- :lease: the holder of a resource
SELECT owner, fence, until FROM leases WHERE resource = ?

-- :leases: leases whose resource begins with a text
SELECT resource, owner, fence, until FROM leases WHERE substr(resource, 1, length(?)) = ? ORDER BY resource

-- :delete_lease: remove a lease
DELETE FROM leases WHERE resource = ?

-- :save_lease: write a lease down
INSERT OR REPLACE INTO leases (resource, owner, fence, until) VALUES (?, ?, ?, ?)
