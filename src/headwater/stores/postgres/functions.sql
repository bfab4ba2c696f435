-- The log's functions; "{schema}" stands for the schema that they live in. PUBLIC may execute none of them:
-- docs/reference/postgres.md has the grants for each kind of role. Those that are SECURITY DEFINER run with the rights of the log's
-- owner, so names are looked up in pg_catalog alone, where no other role can put an operator or a function. The file is run
-- before the tables are made, and again with every step to a newer schema.

-- Publishes inside the caller's transaction and returns the seq: SELECT headwater.publish('orders.new', '{"order": 17}'),
-- with more by name: headwater.publish('orders.new', '{"order": 17}', id => 'order-17', priority => 5). An id that was
-- published on this topic within the last day and the last million messages returns the first one's seq. Other publishers
-- wait until the caller's transaction ends. The constraints of `messages` check the limits.
CREATE OR REPLACE FUNCTION publish(
    topic text,
    data json,
    id text DEFAULT NULL,
    priority integer DEFAULT 0,
    deliver_at bigint DEFAULT NULL,
    expires_at bigint DEFAULT NULL,
    "from" text DEFAULT NULL,
    "to" text DEFAULT NULL,
    reply_to text DEFAULT NULL,
    correlation_id text DEFAULT NULL,
    type text DEFAULT NULL,
    version integer DEFAULT NULL,
    content_type text DEFAULT NULL,
    traceparent text DEFAULT NULL,
    headers json DEFAULT NULL
) RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN "{schema}".publish_checked(topic, data, id, NULL, priority, deliver_at, expires_at, "from", "to", reply_to,
        correlation_id, type, version, content_type, traceparent, headers);
END $$;

-- Publishes for Headwater itself, which has checked the message and passes the log's salt, the time and the dedupe window.
CREATE OR REPLACE FUNCTION publish_checked(
    topic text,
    data json,
    id text DEFAULT NULL,
    published_at bigint DEFAULT NULL,
    priority integer DEFAULT 0,
    deliver_at bigint DEFAULT NULL,
    expires_at bigint DEFAULT NULL,
    "from" text DEFAULT NULL,
    "to" text DEFAULT NULL,
    reply_to text DEFAULT NULL,
    correlation_id text DEFAULT NULL,
    type text DEFAULT NULL,
    version integer DEFAULT NULL,
    content_type text DEFAULT NULL,
    traceparent text DEFAULT NULL,
    headers json DEFAULT NULL,
    remembered_since bigint DEFAULT NULL,
    remembered_count bigint DEFAULT 1000000,
    salt bigint DEFAULT NULL
) RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_variable
DECLARE
    now_ms bigint := coalesce(published_at, (extract(epoch FROM clock_timestamp()) * 1000)::bigint);
    scoped text := topic || '#' || id;
    last_seq bigint;
    known record;
BEGIN
    IF salt IS NOT NULL AND salt <> (SELECT fact.value FROM "{schema}".headwater AS fact WHERE fact.name = 'salt') THEN
        RAISE undefined_function USING MESSAGE = 'this is another log of the same name';
    END IF;
    last_seq := "{schema}".begin_publishing();
    IF id IS NOT NULL THEN
        SELECT stored.seq, stored.published_at INTO known
        FROM "{schema}".remembered_ids AS stored WHERE stored.scoped_id = scoped;
        IF known.seq > last_seq - remembered_count
            AND known.published_at >= coalesce(remembered_since, now_ms - 86400000) THEN
            RETURN known.seq;
        END IF;
        DELETE FROM "{schema}".remembered_ids AS stored WHERE stored.scoped_id = scoped;
        INSERT INTO "{schema}".remembered_ids (seq, scoped_id, published_at) VALUES (last_seq + 1, scoped, now_ms);
    END IF;
    INSERT INTO "{schema}".messages (seq, topic, data, size, published_at, checked, id, priority, deliver_at, expires_at,
        "from", "to", reply_to, correlation_id, type, version, content_type, traceparent, headers)
    VALUES (last_seq + 1, topic, data, octet_length(data::text), now_ms, CASE WHEN salt IS NULL THEN NULL ELSE 2 END, id,
        priority, deliver_at, expires_at, "from", "to", reply_to, correlation_id, type, version, content_type,
        traceparent, headers);
    PERFORM pg_notify('headwater_{schema}', '');
    RETURN last_seq + 1;
END $$;

-- Acks inside the caller's transaction: deletes the row of a delivery in flight, and the dead letter that it was redriven
-- from. Returns false if the message is not in flight with this token.
CREATE OR REPLACE FUNCTION ack(subscription text, seq bigint, attempt integer, token bigint)
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_variable
DECLARE
    letter bigint;
    its_key text;
BEGIN
    IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
        RAISE EXCEPTION 'a transaction that acks must be READ COMMITTED'
            USING ERRCODE = 'invalid_transaction_state', HINT = 'BEGIN ISOLATION LEVEL READ COMMITTED';
    END IF;
    DELETE FROM "{schema}".deliveries AS row
    WHERE row.subscription = ack.subscription AND row.seq = ack.seq AND row.attempts = attempt
        AND row.token = ack.token AND row.token > 0
    RETURNING row.dead_letter, row.key INTO letter, its_key;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    DELETE FROM "{schema}".dead_letters AS dead WHERE dead.id = letter;
    IF its_key IS NOT NULL THEN -- the next of its key may be delivered now
        PERFORM pg_notify('headwater_{schema}', '');
    END IF;
    RETURN true;
END $$;

-- Takes the publishing lock until the end of the transaction, and returns the last seq. The next publisher waits until
-- this transaction has ended, so seqs become visible in order and without holes. A transaction with an older snapshot is
-- refused, because it would assign seqs that are taken.
CREATE OR REPLACE FUNCTION begin_publishing()
RETURNS bigint LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
        RAISE EXCEPTION 'a transaction that publishes must be READ COMMITTED'
            USING ERRCODE = 'invalid_transaction_state', HINT = 'BEGIN ISOLATION LEVEL READ COMMITTED';
    END IF;
    PERFORM pg_advisory_xact_lock(1213661186, hashtext('{schema}'));
    RETURN (
        SELECT greatest(
            (SELECT max(seq) FROM "{schema}".messages),
            (SELECT to_seq FROM "{schema}".pruned ORDER BY from_seq DESC LIMIT 1),
            (SELECT value FROM "{schema}".headwater WHERE name = 'last_seq'), 0
        )
    );
END $$;

-- Returns the seq for a row of a plain INSERT, and notifies waiting consumers. This is a default and not a trigger, because
-- with a trigger COPY, which Headwater publishes with, writes row by row.
CREATE OR REPLACE FUNCTION next_seq()
RETURNS bigint LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM pg_notify('headwater_{schema}', '');
    RETURN "{schema}".begin_publishing() + 1;
END $$;

-- Keeps the last seq when messages are deleted with plain SQL, because positions may be above the messages that are left.
CREATE OR REPLACE FUNCTION keep_last_seq()
RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO "{schema}".headwater AS stored (name, value)
    SELECT 'last_seq', max(seq) FROM "{schema}".messages HAVING max(seq) IS NOT NULL
    ON CONFLICT (name) DO UPDATE SET value = greatest(stored.value, excluded.value);
    RETURN NULL;
END $$;

REVOKE ALL ON FUNCTION publish, publish_checked, ack, begin_publishing, next_seq, keep_last_seq FROM PUBLIC;
