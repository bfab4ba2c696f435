-- Verbs for those who have a connection of their own: SELECT headwater.publish('orders.new', '{"order": 17}'), with more
-- by name: headwater.publish('orders.new', '{"order": 17}', id => 'order-17', priority => 5). They run with the log's
-- schema as their search path and with the rights of its owner, so that USAGE of the schema is all a publisher needs.

-- Publishes inside the caller's transaction and returns the seq. An id that the dedupe window remembers returns the first
-- one's seq. Other publishers wait until the caller's transaction ends.
CREATE OR REPLACE FUNCTION publish(
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
) RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
#variable_conflict use_variable
DECLARE
    now_ms bigint := coalesce(published_at, (extract(epoch FROM clock_timestamp()) * 1000)::bigint);
    last_seq bigint;
    known record;
BEGIN
    IF salt IS NOT NULL AND salt <> (SELECT fact.value FROM headwater AS fact WHERE fact.name = 'salt') THEN
        RAISE undefined_function USING MESSAGE = 'this is another log of the same name';
    END IF;
    last_seq := begin_publishing();
    IF id IS NOT NULL THEN
        SELECT stored.seq, stored.published_at INTO known FROM remembered_ids AS stored WHERE stored.id = publish.id;
        IF known.seq > last_seq - remembered_count
            AND known.published_at >= coalesce(remembered_since, now_ms - 86400000) THEN
            RETURN known.seq;
        END IF;
        DELETE FROM remembered_ids AS stored WHERE stored.id = publish.id;
        INSERT INTO remembered_ids (seq, id, published_at) VALUES (last_seq + 1, publish.id, now_ms);
    END IF;
    INSERT INTO messages (seq, topic, data, size, published_at, checked, id, priority, deliver_at, expires_at, "from",
        "to", reply_to, correlation_id, type, version, content_type, traceparent, headers)
    VALUES (last_seq + 1, topic, data, octet_length(data::text), now_ms, CASE WHEN salt IS NULL THEN NULL ELSE 2 END, id,
        priority, deliver_at, expires_at, "from", "to", reply_to, correlation_id, type, version, content_type,
        traceparent, headers);
    PERFORM pg_notify('headwater_' || current_schema(), '');
    RETURN last_seq + 1;
END $$;

-- Acks inside the caller's transaction: removes the row of a delivery in flight, and the dead letter that it was redriven
-- from. False if it is not, or no longer, in flight.
CREATE OR REPLACE FUNCTION ack(subscription text, seq bigint, attempt integer, token bigint)
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
#variable_conflict use_variable
DECLARE
    letter bigint;
    its_key text;
BEGIN
    IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
        RAISE EXCEPTION 'a transaction that acks must be READ COMMITTED'
            USING ERRCODE = 'invalid_transaction_state', HINT = 'BEGIN ISOLATION LEVEL READ COMMITTED';
    END IF;
    DELETE FROM deliveries AS row
    WHERE row.subscription = ack.subscription AND row.seq = ack.seq AND row.attempts = attempt
        AND row.token = ack.token AND row.token > 0
    RETURNING row.dead_letter, row.key INTO letter, its_key;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    DELETE FROM dead_letters AS dead WHERE dead.id = letter;
    IF its_key IS NOT NULL THEN -- the next of its key may be delivered now
        PERFORM pg_notify('headwater_' || current_schema(), '');
    END IF;
    RETURN true;
END $$;
