-- The log's tables, version 1, made in a schema of their own. Times are milliseconds since 1970 UTC. Texts are ordered
-- by code point (COLLATE "C"), whatever the database's own collation is.

-- One row, one message. `topic` and `data` are all an INSERT by hand needs; such a row is checked here. Headwater's own
-- rows were checked before and say so in `checked`: 1 if they have nothing but topic, data and time, else 2. They come by
-- COPY with their `seq` and `size`. What a row by hand leaves out follows from it: `size` from its data, `id` as in the
-- view. There is one index: a second one costs a third of the speed of publishing.
CREATE TABLE messages (
    seq            bigint PRIMARY KEY,
    published_at   bigint NOT NULL DEFAULT (extract(epoch FROM clock_timestamp()) * 1000)::bigint,
    deliver_at     bigint,
    expires_at     bigint,
    size           integer,
    priority       integer NOT NULL DEFAULT 0,
    version        integer,
    checked        smallint,
    topic          text COLLATE "C" NOT NULL,
    data           json NOT NULL,
    id             text COLLATE "C",
    "from"         text COLLATE "C",
    "to"           text COLLATE "C",
    reply_to       text COLLATE "C",
    correlation_id text COLLATE "C",
    type           text COLLATE "C",
    content_type   text COLLATE "C",
    traceparent    text COLLATE "C",
    headers        json,
    CONSTRAINT "topic must be tokens joined by dots, no wildcards or blanks" CHECK (
        checked IS NOT NULL
        OR topic ~ '^[^.*>#\u0001-\u0020\u007f-\u00a0]+(\.[^.*>#\u0001-\u0020\u007f-\u00a0]+)*$'
    ),
    CONSTRAINT "times are milliseconds since 1970" CHECK (
        checked IS NOT NULL OR (
            published_at BETWEEN 0 AND 253402300799999
            AND (deliver_at IS NULL OR deliver_at BETWEEN 0 AND 253402300799999)
            AND (expires_at IS NULL OR expires_at BETWEEN 0 AND 253402300799999)
        )
    ),
    CONSTRAINT "headers must be a JSON object" CHECK (
        checked IS NOT NULL OR headers IS NULL OR json_typeof(headers) = 'object'
    )
) WITH (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_insert_scale_factor = 0.1);

-- Runs of seqs whose messages retention deleted. What is missing and not in here was not deleted by Headwater. No two
-- runs overlap or touch.
CREATE TABLE pruned (
    from_seq bigint PRIMARY KEY,
    to_seq   bigint NOT NULL
) WITH (fillfactor = 50);

-- Takes the publishing lock until the end of the transaction and tells the last seq that was given out. The next one to
-- ask waits until this transaction has committed, so seqs become visible in their order, without a hole. A transaction
-- that looks at the log as it was earlier would give out seqs that others have, so it is refused.
CREATE FUNCTION begin_publishing() RETURNS bigint LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
BEGIN
    IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
        RAISE EXCEPTION 'a transaction that publishes must be READ COMMITTED'
            USING ERRCODE = 'invalid_transaction_state', HINT = 'BEGIN ISOLATION LEVEL READ COMMITTED';
    END IF;
    PERFORM pg_advisory_xact_lock(1213661186, hashtext(current_schema()));
    RETURN (
        SELECT greatest(
            (SELECT max(seq) FROM messages), (SELECT to_seq FROM pruned ORDER BY from_seq DESC LIMIT 1),
            (SELECT value FROM headwater WHERE name = 'last_seq'), 0
        )
    );
END
$$;

-- The seq of a row that is inserted by hand; whoever waits for messages is told. A trigger before each row would do the
-- same, but COPY, which Headwater publishes with, writes row by row where there is one.
CREATE FUNCTION next_seq() RETURNS bigint LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
BEGIN
    PERFORM pg_notify('headwater_' || current_schema(), '');
    RETURN begin_publishing() + 1;
END
$$;
ALTER TABLE messages ALTER COLUMN seq SET DEFAULT next_seq();

-- Ids that publishers gave, for as long as the dedupe window remembers them. Outlives the message.
CREATE TABLE remembered_ids (
    seq          bigint PRIMARY KEY,
    published_at bigint NOT NULL,
    id           text COLLATE "C" NOT NULL UNIQUE
) WITH (autovacuum_vacuum_scale_factor = 0.02);

-- What numbered publishers have stored: messages `number` and the `length` - 1 after it became `seq` and those after it.
CREATE TABLE receipts (
    publisher text COLLATE "C" NOT NULL,
    number    bigint NOT NULL,
    length    bigint NOT NULL,
    seq       bigint NOT NULL,
    at        bigint NOT NULL,
    PRIMARY KEY (publisher, number)
) WITH (autovacuum_vacuum_scale_factor = 0.02);

-- A row is written anew with every claim and ack; no other column is indexed, so that the new version finds room on the
-- same page and the old one is cleared away without a vacuum.
CREATE TABLE subscriptions (
    id          text COLLATE "C" PRIMARY KEY,
    pattern     text NOT NULL,
    mode        text NOT NULL,
    spec        text NOT NULL,
    floor       bigint NOT NULL,
    delivered   bigint NOT NULL,
    settled     text NOT NULL,
    holder      text NOT NULL,
    fence       bigint NOT NULL,
    lease_until bigint NOT NULL,
    created_at  bigint NOT NULL,
    active_at   bigint NOT NULL,
    acked       bigint NOT NULL,
    redelivered bigint NOT NULL,
    buried      bigint NOT NULL
) WITH (fillfactor = 20, autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 1000);

-- Deliveries in flight (token > 0, due at the end of the lease) or waiting (token 0, due at the end of the delay). Rows
-- come and go; the vacuum comes early and does not dawdle, and leaves the file as long as it is, for the next ones.
CREATE TABLE deliveries (
    seq          bigint NOT NULL,
    due_at       bigint NOT NULL,
    token        bigint NOT NULL,
    dead_letter  bigint,
    attempts     integer NOT NULL,
    priority     integer NOT NULL,
    subscription text COLLATE "C" NOT NULL,
    key          text COLLATE "C",
    PRIMARY KEY (subscription, seq)
) WITH (
    autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0,
    autovacuum_analyze_scale_factor = 0.0, autovacuum_analyze_threshold = 50000, vacuum_truncate = off
);
CREATE INDEX deliveries_by_due ON deliveries (subscription, due_at);
CREATE INDEX deliveries_by_key ON deliveries (subscription, key, seq) WHERE key IS NOT NULL;

-- `message` is the whole message as JSON, for a dead letter outlives it.
CREATE TABLE dead_letters (
    id            bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY,
    subscription  text COLLATE "C" NOT NULL,
    seq           bigint NOT NULL,
    topic         text COLLATE "C" NOT NULL,
    type          text COLLATE "C",
    reason        text NOT NULL,
    attempts      bigint NOT NULL,
    died_at       bigint NOT NULL,
    error         text,
    stack         text,
    handler       text,
    redrives      bigint NOT NULL,
    redriving     boolean NOT NULL,
    redrive_error text,
    message       json NOT NULL
);

CREATE TABLE gaps (
    number       bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY,
    subscription text COLLATE "C" NOT NULL,
    from_seq     bigint NOT NULL,
    to_seq       bigint NOT NULL,
    count        bigint NOT NULL,
    why          text NOT NULL,
    at           bigint NOT NULL,
    told         boolean NOT NULL DEFAULT FALSE
);
CREATE INDEX gaps_by_subscription ON gaps (subscription, told);

CREATE TABLE retention (
    pattern text COLLATE "C" NOT NULL,
    dialect text COLLATE "C" NOT NULL,
    limits  text NOT NULL,
    PRIMARY KEY (pattern, dialect)
);

-- What lies at or below the seq `counted_to`, by topic. The tail above it is counted when somebody asks.
CREATE TABLE topic_counts (
    topic             text COLLATE "C" PRIMARY KEY,
    count             bigint NOT NULL,
    bytes             bigint NOT NULL,
    last_seq          bigint NOT NULL,
    last_published_at bigint NOT NULL
) WITH (fillfactor = 50);

-- The last batch that a sink published, so that a batch it repeats is known.
CREATE TABLE sinks (
    sink  text COLLATE "C" PRIMARY KEY,
    batch bigint NOT NULL,
    at    bigint NOT NULL
) WITH (fillfactor = 50);

-- How long deliveries took, as a histogram for each hour: `count` messages came to the `stage` 'deliver' or 'ack' in a
-- time of this bucket (delivery/histogram.py).
CREATE TABLE timings (
    subscription text COLLATE "C" NOT NULL,
    hour         bigint NOT NULL,
    stage        text COLLATE "C" NOT NULL,
    bucket       bigint NOT NULL,
    count        bigint NOT NULL,
    PRIMARY KEY (subscription, hour, stage, bucket)
) WITH (fillfactor = 70);
CREATE INDEX timings_by_hour ON timings (hour);

CREATE TABLE leases (
    resource text COLLATE "C" PRIMARY KEY,
    owner    text NOT NULL,
    fence    bigint NOT NULL,
    until    bigint NOT NULL
) WITH (fillfactor = 20);

-- Facts about the log itself: schema_version, salt, created_at, counted_to, last_seq.
CREATE TABLE headwater (
    name  text COLLATE "C" PRIMARY KEY,
    value bigint NOT NULL
) WITH (fillfactor = 20);

-- Whoever deletes messages by hand may take the last one: its seq is not given out again, for cursors stand behind it.
CREATE FUNCTION keep_last_seq() RETURNS trigger LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    INSERT INTO headwater AS stored (name, value)
    SELECT 'last_seq', max(seq) FROM messages HAVING max(seq) IS NOT NULL
    ON CONFLICT (name) DO UPDATE SET value = greatest(stored.value, excluded.value);
    RETURN NULL;
END
$$;
CREATE TRIGGER keep_last_seq BEFORE DELETE OR TRUNCATE ON messages FOR EACH STATEMENT EXECUTE FUNCTION keep_last_seq();

-- Every message with its id and size filled in, for reading with plain SQL. The id of a message that was given none is a
-- UUIDv7 of its time, the log's salt and its seq.
CREATE VIEW history AS
SELECT
    seq, coalesce(id, concat_ws(
        '-', lpad(to_hex(published_at >> 16), 8, '0'), lpad(to_hex(published_at & 65535), 4, '0'),
        '7' || lpad(to_hex((SELECT value FROM headwater WHERE name = 'salt') >> 14), 3, '0'),
        to_hex(32768 | ((SELECT value FROM headwater WHERE name = 'salt') & 16383)), lpad(to_hex(seq), 12, '0')
    )) AS id,
    topic, data, type, version, "from", "to", reply_to, correlation_id, content_type, traceparent, headers, priority,
    deliver_at, expires_at, published_at, coalesce(size, octet_length(data::text)) AS size
FROM messages;
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
