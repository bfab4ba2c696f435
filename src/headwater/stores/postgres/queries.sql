-- What differs in PostgreSQL from the statements of ../queries.sql. {message} is one row of `messages` (as m) written as a
-- JSON array in the field order of message.Message. Batches travel as one text, in (an array's
-- literal) and out (JSON): measured against rows and parameters one by one, it is quicker on both sides.

-- :plan_by_index: every statement here is meant to go by an index; before a table was first analysed, the planner guesses
-- and would rather read and sort ten thousands of rows. A statement is planned once and not for each of its bindings
SELECT set_config('enable_seqscan', 'off', TRUE), set_config('enable_bitmapscan', 'off', TRUE),
    set_config('plan_cache_mode', 'force_generic_plan', TRUE)

-- :lock_shared: many may write at once, each with what it locks by itself
pg_advisory_xact_lock_shared(1213661185, hashtext(current_schema()))

-- :lock_alone: no other transaction writes until this transaction ends
pg_advisory_xact_lock(1213661185, hashtext(current_schema()))

-- :announce: a server lives as long as its session holds this
SELECT pg_advisory_lock(1213661187, ?::integer)

-- :is_announced: whether a session holds the lock of a server
SELECT EXISTS (
    SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND classid = 1213661187 AND objid = ?::bigint::oid
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
)

-- :begin_users_sql: names are looked up as the user is used to, in the log's schema last; which schema that is
SAVEPOINT headwater; SELECT current_schema();
SELECT set_config('headwater.search_path', current_setting('search_path'), TRUE);
SET LOCAL search_path TO DEFAULT; SET LOCAL enable_seqscan TO DEFAULT; SET LOCAL enable_bitmapscan TO DEFAULT;
SET LOCAL plan_cache_mode TO DEFAULT;
SELECT set_config(
    'search_path',
    concat_ws(
        ', ', nullif(current_setting('search_path'), ''), replace(current_setting('headwater.search_path'), ', pg_temp', '')
    ), TRUE
)

-- :end_users_sql: names are looked up in the log's schema again
SELECT set_config('search_path', current_setting('headwater.search_path'), TRUE); {plan_by_index}; RELEASE SAVEPOINT headwater

-- :untouched: whether all tables of the log are there, and this transaction holds no more than a writer's lock on them
SELECT count(*) = ? AND NOT coalesce(bool_or(EXISTS (
    SELECT 1 FROM pg_locks
    WHERE pid = pg_backend_pid() AND locktype = 'relation' AND relation = own.oid
        AND mode NOT IN ('AccessShareLock', 'RowShareLock', 'RowExclusiveLock')
)), FALSE)
FROM pg_class AS own JOIN pg_namespace AS place ON place.oid = own.relnamespace
WHERE nspname = ? AND relkind = 'r' AND relname = ANY(?::text[])

-- :lock_publishing: no other transaction publishes until this transaction ends; the last seq that was given out
SELECT begin_publishing()

-- :message: a message row as JSON text; the rare fields only where `checked` does not say that there are none. NULL for a
-- row by hand that is too long to stand in one text with others
CASE
    WHEN m.checked = 1 THEN '[' || m.seq || ',' || to_json(m.topic) || ',' || m.data || ',' || m.published_at || ','
        || m.size || ',' || ? || ']'
    WHEN m.checked = 2 OR octet_length(m.data::text) + coalesce(octet_length(m.headers::text), 0) <= 1048576 THEN
        '[' || m.seq || ',' || to_json(m.topic) || ',' || m.data || ',' || m.published_at || ','
        || coalesce(m.size, octet_length(m.data::text)) || ',' || coalesce(to_json(m.id)::text, ?) || ','
        || substr(json_build_array({extras_of_m})::text, 2)
END

-- :counted_between: the messages of a seq range by topic, in their order, so that rows are locked in one
SELECT topic, count(*) AS count, sum({size}) AS bytes, max(seq) AS last_seq, max(published_at) AS last_published_at
FROM messages WHERE seq > ? AND seq <= ? GROUP BY topic ORDER BY topic

-- :size: how many bytes the data of a message has
coalesce(size, octet_length(data::text))

-- :last_seq: the highest seq ever given out
SELECT greatest(
    (SELECT max(seq) FROM messages), (SELECT to_seq FROM pruned ORDER BY from_seq DESC LIMIT 1),
    (SELECT value FROM headwater WHERE name = 'last_seq'), 0
)

-- :scan: matching messages of a seq range, in order, how many they are, and the last seq of that moment
SELECT '[' || string_agg({message}, ',') || ']', count(*), ({last_seq})
FROM (SELECT * FROM messages WHERE seq > ? AND seq <= ? AND {condition} ORDER BY seq LIMIT ?) AS m

-- :quiet_upto: how far topics are counted, if none of these has a message above a seq there; {condition} is on topics alone
SELECT value FROM headwater WHERE name = 'counted_to'
    AND NOT EXISTS (SELECT 1 FROM topic_counts WHERE count > 0 AND last_seq > ? AND {condition})

-- :messages: messages by seq, how many they are, and no last seq
SELECT '[' || string_agg({message}, ',') || ']', count(*), 0
FROM messages AS m WHERE m.seq {among}

-- :heads: the same without data and free headers
SELECT {json_rows}(
    seq, topic, NULL, published_at, {size}, coalesce(to_json(id), to_json(?::bigint)), {extras_but_headers}
){as_json} FROM messages WHERE seq {among}

-- :candidates: messages of a seq range that may be wanted, and whether their content is known to fit
SELECT seq, topic, "from", "to", {size}, published_at, {judged}
FROM messages WHERE seq > ? AND seq <= ? AND {condition} ORDER BY seq {direction} LIMIT ?

-- :columns: one message, column by column
SELECT seq, topic, data::text, published_at, {size}, id, {extras_raw}
FROM messages WHERE seq = ?

-- :oldest: what retention looks at, in seq order
SELECT '[' || string_agg('[' || seq || ',' || to_json(topic) || ',' || {size} || ',' || published_at || ']', ',') || ']'
FROM (SELECT * FROM messages WHERE seq > ? AND seq <= ? AND {condition} ORDER BY seq LIMIT ?) AS page

-- :distinct_topics: the topics published to in a seq range
SELECT coalesce(json_agg(DISTINCT topic), '[]')::text FROM messages WHERE seq > ? AND seq <= ?

-- :copy_plain: messages with nothing but topic and data
COPY messages (seq, topic, data, published_at, size, checked) FROM STDIN

-- :copy_full: messages with all their fields
COPY messages (seq, topic, data, published_at, size, checked, id, {extras}) FROM STDIN

-- :known_ids: which of the given scoped ids are remembered
SELECT scoped_id, seq, published_at FROM remembered_ids WHERE scoped_id = ANY(?::text[])

-- :remember_ids: remember ids, forgetting an earlier message of the same topic and id
INSERT INTO remembered_ids (seq, scoped_id, published_at) SELECT seq, scoped_id, ?::bigint
FROM unnest(?::bigint[], ?::text[]) AS new(seq, scoped_id)
ON CONFLICT (scoped_id) DO UPDATE SET seq = excluded.seq, published_at = excluded.published_at

-- :forget_ids: drop ids outside the dedupe window
DELETE FROM remembered_ids WHERE seq = ANY(ARRAY(
    SELECT seq FROM remembered_ids WHERE seq <= ? OR published_at < ? ORDER BY seq LIMIT ? FOR UPDATE SKIP LOCKED
))

-- :add_receipts: note what numbers became which seqs
INSERT INTO receipts (publisher, number, length, seq, at)
SELECT ?, number, length, seq, ?::bigint FROM unnest(?::bigint[], ?::bigint[], ?::bigint[]) AS new(number, length, seq)
ON CONFLICT (publisher, number) DO UPDATE SET length = excluded.length, seq = excluded.seq, at = excluded.at

-- :forget_old_receipts: drop what no publisher will ask for any more
DELETE FROM receipts WHERE ctid = ANY(ARRAY(
    SELECT ctid FROM receipts WHERE at < ? LIMIT ? FOR UPDATE SKIP LOCKED
))

-- :mark: what tells a message from another one that has the same seq after a restore
SELECT concat_ws(' ', xmin, published_at, topic) FROM messages WHERE seq = ?

-- :delete_messages: remove messages by seq and take them off the stored counts; which of them were there
WITH gone AS (
    DELETE FROM messages WHERE seq {among} RETURNING seq, topic, {size} AS size
), uncounted AS (
    UPDATE topic_counts SET count = topic_counts.count - gone_by_topic.count, bytes = topic_counts.bytes - gone_by_topic.bytes
    FROM (SELECT topic, count(*) AS count, sum(size) AS bytes FROM gone GROUP BY topic) AS gone_by_topic
    WHERE topic_counts.topic = gone_by_topic.topic
)
SELECT coalesce(json_agg(seq ORDER BY seq), '[]')::text FROM gone

-- :pruned: runs of deleted seqs that overlap a range, clipped to it; one run at most reaches into it from below
SELECT {json_rows}(greatest(from_seq, low), least(to_seq, high)) ORDER BY from_seq{as_json}
FROM (SELECT ?::bigint AS low, ?::bigint AS high) AS asked, LATERAL (
    (
        SELECT from_seq, to_seq FROM pruned WHERE from_seq <= low AND low <= high ORDER BY from_seq DESC LIMIT 1
    )
    UNION ALL
    SELECT from_seq, to_seq FROM pruned WHERE from_seq > low AND from_seq <= high
) AS near
WHERE to_seq >= low

-- :pruned_beside: runs that end at one of the first seqs, or begin at one of the second
SELECT {json_rows}(from_seq, to_seq){as_json} FROM (
    SELECT stored.from_seq, stored.to_seq FROM unnest(?::bigint[]) AS ends(seq), LATERAL (
        SELECT from_seq, to_seq FROM pruned WHERE from_seq <= ends.seq ORDER BY from_seq DESC LIMIT 1
    ) AS stored
    WHERE stored.to_seq = ends.seq
    UNION
    SELECT from_seq, to_seq FROM pruned WHERE from_seq {among}
) AS beside

-- :add_pruned: runs of deleted seqs, or longer ones that begin where a stored one does
INSERT INTO pruned (from_seq, to_seq) SELECT * FROM unnest(?::bigint[], ?::bigint[])
ON CONFLICT (from_seq) DO UPDATE SET to_seq = excluded.to_seq

-- :add_timings: count further deliveries in, of subscriptions that are still there; in one order, so that two hosts that
-- do it at once wait for each other and not in a circle
INSERT INTO timings AS stored (subscription, hour, stage, bucket, count)
SELECT subscription, hour, stage, bucket, sum(count)
FROM unnest(?::text[], ?::bigint[], ?::text[], ?::bigint[], ?::bigint[])
    AS new(subscription, hour, stage, bucket, count)
WHERE subscription IN (SELECT id FROM subscriptions)
GROUP BY subscription, hour, stage, bucket ORDER BY subscription, hour, stage, bucket
ON CONFLICT (subscription, hour, stage, bucket) DO UPDATE SET count = stored.count + excluded.count

-- :forget_old_timings: drop the histograms of hours long ago
DELETE FROM timings WHERE ctid = ANY(ARRAY(
    SELECT ctid FROM timings WHERE hour < ? LIMIT ? FOR UPDATE SKIP LOCKED
))

-- :file_bytes: how much disk space the tables and their indexes take
SELECT coalesce(sum(pg_total_relation_size(oid)), 0)::bigint FROM pg_class
WHERE relkind = 'r' AND relnamespace = to_regnamespace(quote_ident(current_schema()))

-- :samples: the figures over time of one step, from a time on
SELECT '[' || coalesce(string_agg(figures, ',' ORDER BY at), '') || ']' FROM samples WHERE step = ? AND at >= ?

-- :fact_to_change: one fact, locked until this transaction ends
{fact} FOR NO KEY UPDATE

-- :subscription_to_change: one subscription and its version, locked until this transaction ends
SELECT {subscription_columns}, xmin::text FROM subscriptions WHERE id = ? FOR NO KEY UPDATE

-- :lock_unchanged: the same where the subscription is known already; an error (22012) if it is not of this version
SELECT 1 / count(*) FROM (SELECT 1 FROM subscriptions WHERE id = ? AND xmin = ?::xid FOR NO KEY UPDATE) AS unchanged

-- :lock_as_assumed: the same where more is taken for true of it
{lock_unchanged} WHERE {as_assumed}

-- :check_assumed: the same where the subscription is locked already
SELECT 1 / count(*) FROM (SELECT WHERE {as_assumed}) AS holds

-- :as_assumed: nothing is due up to a time and there are no gaps to report, unless the time is negative; so many messages
-- are there; and so many deliveries, which no other transaction is just settling
(?::bigint < 0 OR (
    NOT EXISTS (SELECT 1 FROM deliveries WHERE subscription = ? AND due_at <= ?)
    AND NOT EXISTS (SELECT 1 FROM gaps WHERE subscription = ? AND NOT told)
))
AND ? = (SELECT count(*) FROM messages WHERE seq {among})
AND ? = (SELECT count(*) FROM (
    SELECT 1 FROM deliveries WHERE subscription = ? AND seq {among} FOR UPDATE SKIP LOCKED
) AS held)

-- :move_as_assumed: move_subscription with the check of lock_as_assumed
WITH unchanged AS ({move_subscription} AND xmin = ?::xid AND {as_assumed} RETURNING 1) SELECT 1 / count(*) FROM unchanged

-- :move_unchanged: move_subscription with the check of lock_unchanged
WITH unchanged AS ({move_subscription} AND xmin = ?::xid RETURNING 1) SELECT 1 / count(*) FROM unchanged

-- :owned_subscriptions: how many of them belong to an owner
SELECT count(*) FROM subscriptions WHERE spec::json ->> 'owner' = ?

-- :move_subscription: replace what claims and acks change of a subscription that is there
UPDATE subscriptions SET
    floor = ?, delivered = ?, settled = ?, holder = ?, fence = ?, lease_until = ?, active_at = ?, acked = ?,
    redelivered = ?, buried = ?
WHERE id = ?

-- :delivery: a delivery row as JSON text, in the field order of records.DeliveryRow
'[' || seq || ',' || attempts || ',' || due_at || ',' || token || ',' || priority || ','
|| coalesce(to_json(key)::text, 'null') || ',' || coalesce(dead_letter::text, 'null') || ']'

-- :due: claimable delivery rows, {locked} or not
SELECT '[' || string_agg({delivery}, ',') || ']' FROM (
    SELECT * FROM deliveries AS candidate
    WHERE subscription = ? AND due_at <= ? AND {which} AND {not_behind_its_key}
    ORDER BY {order} LIMIT ? {locked}
) AS due

-- :look_ahead: when the next delivery is due, and whether there are gaps to report
SELECT ({next_due_ms}), EXISTS (SELECT 1 FROM gaps WHERE subscription = ? AND NOT told)

-- :deliveries: delivery rows by seq
SELECT '[' || string_agg({delivery}, ',') || ']' FROM (
    SELECT * FROM deliveries WHERE subscription = ? AND seq {among} {locked}
) AS held

-- :deliveries_by: delivery rows by token
SELECT '[' || string_agg({delivery}, ',') || ']' FROM (
    SELECT * FROM deliveries WHERE subscription = ? AND token = ? {locked}
) AS held

-- :leased_seqs: seqs of a range under a live lease
SELECT coalesce(json_agg(DISTINCT seq), '[]')::text FROM deliveries
WHERE subscription IN (SELECT id FROM subscriptions) AND seq BETWEEN ? AND ? AND token > 0 AND due_at > ?

-- :put_deliveries: insert delivery rows that differ in their seq alone, or replace them; where there are none between the
-- first and the last, without ON CONFLICT, which takes two thirds of the time
WITH there AS MATERIALIZED (
    SELECT EXISTS (SELECT 1 FROM deliveries WHERE subscription = $1::text AND seq BETWEEN $9::bigint AND $10::bigint) AS some_row
), added AS (
    INSERT INTO deliveries (subscription, attempts, due_at, token, priority, key, dead_letter, seq)
    SELECT $1::text, $2::integer, $3::bigint, $4::bigint, $5::integer, $6::text, $7::bigint, unnest($8::bigint[])
    WHERE NOT (SELECT some_row FROM there)
)
INSERT INTO deliveries (subscription, attempts, due_at, token, priority, key, dead_letter, seq)
SELECT $1::text, $2::integer, $3::bigint, $4::bigint, $5::integer, $6::text, $7::bigint, unnest($8::bigint[])
WHERE (SELECT some_row FROM there)
{or_replace}

-- :put_mixed_deliveries: the same for rows that differ in everything
INSERT INTO deliveries (subscription, seq, attempts, due_at, token, priority, key, dead_letter)
SELECT ?, * FROM unnest(
    ?::bigint[], ?::integer[], ?::bigint[], ?::bigint[], ?::integer[], ?::text[], ?::bigint[]
)
{or_replace}

-- :or_replace: a delivery row that is there already
ON CONFLICT (subscription, seq) DO UPDATE SET
    attempts = excluded.attempts, due_at = excluded.due_at, token = excluded.token, priority = excluded.priority,
    key = excluded.key, dead_letter = excluded.dead_letter

-- :end_leases: make deliveries in flight due
UPDATE deliveries SET due_at = ? WHERE subscription = ? AND seq = ANY(ARRAY(
    SELECT seq FROM deliveries WHERE subscription = ? AND token > 0 AND due_at > ? FOR UPDATE SKIP LOCKED
))

-- :remove_deliveries: remove delivery rows by seq; if others of their key may come now, that is news
WITH gone AS (DELETE FROM deliveries WHERE subscription = ? AND seq {among} RETURNING key)
SELECT pg_notify(?, ?) FROM gone WHERE key IS NOT NULL LIMIT 1

-- :dead_letters: dead letters above an id, as many as come before so many bytes, and the one that exceeds them
SELECT id, subscription, reason, attempts, died_at, error, stack, handler, redrives, redriving, redrive_error, message
FROM (
    SELECT *, sum(octet_length(message) + coalesce(octet_length(error), 0) + coalesce(octet_length(stack), 0))
        OVER (ORDER BY id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
    FROM (
        SELECT id, subscription, reason, attempts, died_at, error, stack, handler, redrives, redriving, redrive_error,
            message::text
        FROM dead_letters WHERE id > ? AND {condition} ORDER BY id LIMIT ?
    ) AS page
) AS sized WHERE coalesce(before, 0) < ? ORDER BY id

-- :lease_to_change: the holder of a resource, locked until this transaction ends
{lease} FOR NO KEY UPDATE

-- :add_free_lease: a row that can be locked
INSERT INTO leases (resource, owner, fence, until) VALUES (?, '', 0, 0) ON CONFLICT (resource) DO NOTHING

-- :note_commit: the number of the transaction that a store commits last, by which it knows what became of a lost answer
INSERT INTO leases (resource, owner, fence, until)
VALUES (?, '', ?, (extract(epoch FROM clock_timestamp()) * 1000)::bigint)
ON CONFLICT (resource) DO UPDATE SET fence = excluded.fence, until = excluded.until

-- :notify: others may have something to read
SELECT pg_notify(?, ?)

-- :commit_unsynced: a commit that a power cut may undo; a later one that is synced keeps it
set_config('synchronous_commit', 'off', TRUE)

-- :letter_id: the given one; a new dead letter, which has 0, gets the next
coalesce(nullif(?::bigint, 0), nextval(pg_get_serial_sequence('dead_letters', 'id')))
