-- The log's tables, made in a schema of their own. Times are milliseconds since 1970 UTC. Texts are ordered
-- by code point (COLLATE "C"), whatever the database's own collation is.

-- One row is one message. An INSERT needs `topic` and `data` only, and the constraints check such a row. Headwater checks
-- its own rows before, and sets `checked`: 1 if a row has only topic, data and time, else 2. It writes them by COPY, with
-- `seq` and `size`. Otherwise `size` is computed from the data, and where `id` is NULL, the view `history` derives the id.
-- There is one index: a second one costs a third of the speed of publishing.
CREATE TABLE messages (
    seq            bigint PRIMARY KEY DEFAULT next_seq(),
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
    CONSTRAINT "topic must have 256 bytes and 32 tokens at most, no blanks" CHECK (
        checked IS NOT NULL OR (
            octet_length(topic) <= 256 AND array_length(string_to_array(topic, '.'), 1) <= 32
            AND topic !~ '[\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]'
        )
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
    ),
    CONSTRAINT "data must have 1048576 bytes at most, headers 65536" CHECK (
        checked IS NOT NULL OR (octet_length(data::text) <= 1048576 AND octet_length(headers::text) <= 65536)
    ),
    CONSTRAINT "id must have 1 to 128 characters, other texts to 256" CHECK (
        checked IS NOT NULL OR (
            length(id) BETWEEN 1 AND 128 AND length("from") BETWEEN 1 AND 256 AND length("to") BETWEEN 1 AND 256
            AND length(reply_to) BETWEEN 1 AND 256 AND length(correlation_id) BETWEEN 1 AND 256
            AND length(type) BETWEEN 1 AND 256 AND length(content_type) BETWEEN 1 AND 256
            AND length(traceparent) BETWEEN 1 AND 256
        )
    ),
    CONSTRAINT "version must be 0 to 1000000, priority -1000000 to 1000000" CHECK (
        checked IS NOT NULL OR (version BETWEEN 0 AND 1000000 AND priority BETWEEN -1000000 AND 1000000)
    )
) WITH (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_insert_scale_factor = 0.1);

-- Runs of seqs that retention deleted, so that the audit tells a deletion from a loss. No two runs overlap or touch.
CREATE TABLE pruned (
    from_seq bigint PRIMARY KEY,
    to_seq   bigint NOT NULL
) WITH (fillfactor = 50);

-- Ids that publishers gave, kept for the dedupe window, even if the message is deleted. `scoped_id` is the topic and the
-- id, joined by #, because an id belongs to its topic; no topic contains a #.
CREATE TABLE remembered_ids (
    seq          bigint PRIMARY KEY,
    published_at bigint NOT NULL,
    scoped_id    text COLLATE "C" NOT NULL UNIQUE
) WITH (autovacuum_vacuum_scale_factor = 0.02);

-- Runs of a publisher's numbered messages: `length` messages from `number` on have the seqs from `seq` on.
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

-- Deliveries in flight (token > 0, due at the end of `ack_wait`) or waiting (token 0, due at the end of the delay). Rows
-- are inserted and deleted often, so autovacuum runs early, without delays, and does not truncate the file.
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

-- Dead letters. `message` is the whole message as JSON, because retention may delete the message itself.
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
CREATE INDEX dead_letters_by_seq ON dead_letters (seq);

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

-- Counts of the messages up to the seq `counted_to`, by topic. Later messages are counted on request.
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

-- The log's figures over time, as JSON: for each `step` between two of them, in milliseconds, a ring of rows whose oldest
-- one is replaced (broker/history.py).
CREATE TABLE samples (
    step    bigint NOT NULL,
    slot    bigint NOT NULL,
    at      bigint NOT NULL,
    figures text NOT NULL,
    PRIMARY KEY (step, slot)
) WITH (fillfactor = 70);

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

REVOKE ALL ON messages, pruned, remembered_ids, receipts, subscriptions, deliveries, dead_letters, gaps, retention,
    topic_counts, sinks, timings, samples, leases, headwater, history FROM PUBLIC;
REVOKE ALL ON SEQUENCE dead_letters_id_seq, gaps_number_seq FROM PUBLIC;
