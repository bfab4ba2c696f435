-- What differs in SQLite from the statements of ../queries.sql. {message} is one row of `messages` (as m) written as a
-- JSON array in the field order of message.Message. Batches travel as one JSON text, in and
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
FROM messages AS m WHERE m.seq {among}

-- :heads: the same without data and free headers
SELECT {json_rows}(
    seq, topic, NULL, published_at, {size}, coalesce(id, ?), {extras_but_headers}
){as_json} FROM messages WHERE seq {among}

-- :candidates: messages of a seq range that may be wanted, and whether their content is known to fit
SELECT seq, CAST(topic AS BLOB), CAST("from" AS BLOB), CAST("to" AS BLOB), {size}, published_at, {judged}
FROM messages WHERE seq > ? AND seq <= ? AND {condition} ORDER BY seq {direction} LIMIT ?

-- :columns: one message, column by column, the payload as bytes
SELECT seq, CAST(topic AS BLOB), CAST(data AS BLOB), published_at, size, coalesce(id, ?), {extras_raw}
FROM messages WHERE seq = ?

-- :oldest: what retention looks at, in seq order
SELECT {json_rows}(seq, topic, size, published_at){as_json} FROM (
    SELECT seq, topic, {size} AS size, published_at FROM messages
    WHERE seq > ? AND seq <= ? AND {condition} ORDER BY seq LIMIT ?
)

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
SELECT scoped_id, seq, published_at FROM remembered_ids WHERE scoped_id {among}

-- :remember_ids: remember ids, forgetting an earlier message of the same topic and id
INSERT OR REPLACE INTO remembered_ids (seq, scoped_id, published_at)
SELECT value, key, ? FROM json_each(?)

-- :forget_ids: drop ids outside the dedupe window
DELETE FROM remembered_ids
WHERE seq IN (SELECT seq FROM remembered_ids WHERE seq <= ? OR published_at < ? ORDER BY seq LIMIT ?)

-- :add_receipt: note what numbers became which seqs
INSERT OR REPLACE INTO receipts (publisher, number, length, seq, at) VALUES (?, ?, ?, ?, ?)

-- :forget_old_receipts: drop what no publisher will ask for any more
DELETE FROM receipts
WHERE (publisher, number) IN (SELECT publisher, number FROM receipts WHERE at < ? LIMIT ?)

-- :counted_between: the messages of a seq range by topic; the LIMIT keeps SQLite from sorting them with their data
SELECT topic, count(*) AS count, sum(size) AS bytes, max(seq) AS last_seq, max(published_at) AS last_published_at
FROM (SELECT topic, {size} AS size, seq, published_at FROM messages WHERE seq > ? AND seq <= ? LIMIT -1) GROUP BY topic

-- :size: how many bytes the data of a message has; unlike the column `size` it does not load them
octet_length(data)

-- :mark: what tells a message from another one that has the same seq after a restore
SELECT published_at || ' ' || topic FROM messages WHERE seq = ?

-- :uncount: take deleted messages off the stored counts
UPDATE topic_counts SET count = topic_counts.count - gone.count, bytes = topic_counts.bytes - gone.bytes
FROM (SELECT value ->> 0 AS topic, value ->> 1 AS count, value ->> 2 AS bytes FROM json_each(?)) AS gone
WHERE topic_counts.topic = gone.topic

-- :present: count and bytes by topic of those of the given seqs that exist
SELECT {json_rows}(topic, count, bytes){as_json} FROM (
    SELECT topic, count(*) AS count, sum(size) AS bytes FROM (
        SELECT topic, {size} AS size FROM messages WHERE seq {among} LIMIT -1
    ) GROUP BY topic
)

-- :present_seqs: those of the given seqs that exist
SELECT json_group_array(seq) FROM (
    SELECT seq FROM messages WHERE seq {among} ORDER BY seq
)

-- :delete_messages: remove messages by seq
DELETE FROM messages WHERE seq {among}

-- :pruned: runs of deleted seqs that overlap a range, clipped to it; one run at most reaches into it from below
SELECT {json_rows}(max(from_seq, ?1), min(to_seq, ?2)){as_json} FROM (
    SELECT from_seq, to_seq FROM pruned
    WHERE from_seq BETWEEN coalesce((SELECT max(from_seq) FROM pruned WHERE from_seq <= ?1), ?1) AND ?2
        AND to_seq >= ?1 AND ?1 <= ?2
    ORDER BY from_seq
)

-- :pruned_beside: runs that end at one of the first seqs, or begin at one of the second
SELECT {json_rows}(from_seq, to_seq){as_json} FROM (
    SELECT stored.from_seq, stored.to_seq FROM json_each(?1) AS ends CROSS JOIN pruned AS stored
    WHERE stored.from_seq = (SELECT max(from_seq) FROM pruned WHERE from_seq <= ends.value)
        AND stored.to_seq = ends.value
    UNION
    SELECT from_seq, to_seq FROM pruned WHERE from_seq IN (SELECT value FROM json_each(?2))
)

-- :add_pruned: a run of deleted seqs, or a longer one that begins where a stored one does; repeated for a batch
INSERT OR REPLACE INTO pruned (from_seq, to_seq) VALUES

-- :add_timings: count further deliveries in, of subscriptions that are still there
INSERT INTO timings (subscription, hour, stage, bucket, count)
SELECT value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4 FROM json_each(?)
WHERE value ->> 0 IN (SELECT id FROM subscriptions)
ON CONFLICT (subscription, hour, stage, bucket) DO UPDATE SET count = count + excluded.count

-- :forget_old_timings: drop the histograms of hours long ago
DELETE FROM timings WHERE (subscription, hour, stage, bucket) IN (
    SELECT subscription, hour, stage, bucket FROM timings WHERE hour < ? LIMIT ?
)

-- :file_bytes: the size of the database file, free pages included
SELECT page_count * page_size FROM pragma_page_count, pragma_page_size

-- :samples: the figures over time of one step, from a time on
SELECT json_group_array(json(figures)) FROM (SELECT figures FROM samples WHERE step = ? AND at >= ? ORDER BY at)

-- :owned_subscriptions: how many of them belong to an owner
SELECT count(*) FROM subscriptions WHERE spec ->> 'owner' = ?

-- :due: claimable delivery rows with their messages; of one key only the first
SELECT '[' || group_concat(
    '[[' || d.seq || ',' || d.attempts || ',' || d.due_at || ',' || d.token || ',' || d.priority || ','
    || json_quote(d.key) || ',' || json_quote(d.dead_letter) || '],'
    || iif(m.seq IS NULL, 'null', {message}) || ']'
) || ']'
FROM (
    SELECT * FROM deliveries AS candidate
    WHERE subscription = ? AND due_at <= ? AND {which} AND {not_behind_its_key}
    ORDER BY {order} LIMIT ?
) AS d LEFT JOIN messages AS m ON m.seq = d.seq

-- :due_seqs: the same without the messages, where they cannot be read all at once
SELECT seq FROM deliveries AS candidate
WHERE subscription = ? AND due_at <= ? AND {which} AND {not_behind_its_key}
ORDER BY {order} LIMIT ?

-- :deliveries: delivery rows by seq
SELECT {json_rows}(seq, attempts, due_at, token, priority, key, dead_letter){as_json} FROM deliveries
WHERE subscription = ? AND seq {among}

-- :deliveries_by: delivery rows by token
SELECT {json_rows}(seq, attempts, due_at, token, priority, key, dead_letter){as_json} FROM deliveries
WHERE subscription = ? AND token = ?

-- :leased_seqs: seqs of a range under a live lease
SELECT json_group_array(DISTINCT seq) FROM deliveries WHERE seq BETWEEN ? AND ? AND token > 0 AND due_at > ?

-- :put_deliveries: insert delivery rows that differ in their seq alone, or replace them
INSERT OR REPLACE INTO deliveries (subscription, attempts, due_at, token, priority, key, dead_letter, seq)
SELECT ?, ?, ?, ?, ?, ?, ?, value FROM json_each(?)

-- :end_leases: make deliveries in flight due
UPDATE deliveries SET due_at = ? WHERE subscription = ? AND token > 0 AND due_at > ?

-- :remove_deliveries: remove delivery rows by seq
DELETE FROM deliveries WHERE subscription = ? AND seq {among}

-- :dead_letters: dead letters above an id
SELECT id, subscription, reason, attempts, died_at, error, stack, handler, redrives, redriving, redrive_error, message
FROM dead_letters WHERE id > ? AND {condition} ORDER BY id

-- :letter_id: the given one; a new dead letter, which has 0, gets the next
nullif(?, 0)
