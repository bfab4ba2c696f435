-- The log's tables, version 6. Times are milliseconds since 1970 UTC.

-- One row is one message. An INSERT needs `topic` and `data` only, and the constraints check such a row. Headwater checks
-- its own rows before, and sets `checked`: 1 if a row has only topic, data and time, else 2. Where `id` is NULL, the view
-- `history` derives the id from the row.
CREATE TABLE messages (
    seq            INTEGER PRIMARY KEY AUTOINCREMENT,
    topic          TEXT NOT NULL,
    data           TEXT NOT NULL,
    published_at   INTEGER NOT NULL DEFAULT (CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)),
    checked        INTEGER,
    id             TEXT,
    priority       INTEGER NOT NULL DEFAULT 0,
    deliver_at     INTEGER,
    expires_at     INTEGER,
    "from"         TEXT,
    "to"           TEXT,
    reply_to       TEXT,
    correlation_id TEXT,
    type           TEXT,
    version        INTEGER,
    content_type   TEXT,
    traceparent    TEXT,
    headers        TEXT,
    size           INTEGER GENERATED ALWAYS AS (length(CAST(data AS BLOB))) VIRTUAL,
    CONSTRAINT "topic must be tokens joined by dots, without wildcards or blanks" CHECK (
        checked IS NOT NULL OR (
            topic <> '' AND '.' || topic || '.' NOT GLOB '*..*' AND topic NOT GLOB '*[*>#' || char(1) || '- ]*'
        )
    ),
    CONSTRAINT "times are milliseconds since 1970" CHECK (
        checked IS NOT NULL OR (
            published_at BETWEEN 0 AND 253402300799999
            AND (deliver_at IS NULL OR deliver_at BETWEEN 0 AND 253402300799999)
            AND (expires_at IS NULL OR expires_at BETWEEN 0 AND 253402300799999)
        )
    ),
    CONSTRAINT "data must be JSON" CHECK (checked IS NOT NULL OR json_valid(data)),
    CONSTRAINT "headers must be a JSON object" CHECK (
        headers IS NULL OR checked IS NOT NULL OR (json_valid(headers) AND json_type(headers) = 'object')
    )
) STRICT;

-- Ids that publishers gave, kept for the dedupe window, even if the message is deleted. `scoped_id` is the topic and the
-- id, joined by #, because an id belongs to its topic; no topic contains a #.
CREATE TABLE remembered_ids (
    seq          INTEGER PRIMARY KEY,
    scoped_id    TEXT NOT NULL,
    published_at INTEGER NOT NULL
) STRICT;
CREATE UNIQUE INDEX remembered_ids_by_scoped_id ON remembered_ids (scoped_id);

-- Runs of a publisher's numbered messages: `length` messages from `number` on have the seqs from `seq` on.
CREATE TABLE receipts (
    publisher TEXT NOT NULL,
    number    INTEGER NOT NULL,
    length    INTEGER NOT NULL,
    seq       INTEGER NOT NULL,
    at        INTEGER NOT NULL,
    PRIMARY KEY (publisher, number)
) STRICT, WITHOUT ROWID;

-- Durable subscriptions: settings (`spec`), position (`floor`), ranges settled above it, holder and its lease.
CREATE TABLE subscriptions (
    id          TEXT PRIMARY KEY,
    pattern     TEXT NOT NULL,
    mode        TEXT NOT NULL,
    spec        TEXT NOT NULL,
    floor       INTEGER NOT NULL,
    delivered   INTEGER NOT NULL,
    settled     TEXT NOT NULL,
    holder      TEXT NOT NULL,
    fence       INTEGER NOT NULL,
    lease_until INTEGER NOT NULL,
    created_at  INTEGER NOT NULL,
    active_at   INTEGER NOT NULL,
    acked       INTEGER NOT NULL,
    redelivered INTEGER NOT NULL,
    buried      INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- Deliveries in flight (token > 0, due at the end of `ack_wait`) or waiting (token 0, due at the end of the delay).
CREATE TABLE deliveries (
    subscription TEXT NOT NULL,
    seq          INTEGER NOT NULL,
    attempts     INTEGER NOT NULL,
    due_at       INTEGER NOT NULL,
    token        INTEGER NOT NULL,
    priority     INTEGER NOT NULL,
    key          TEXT,
    dead_letter  INTEGER,
    PRIMARY KEY (subscription, seq)
) STRICT, WITHOUT ROWID;
CREATE INDEX deliveries_by_due ON deliveries (subscription, due_at);
CREATE INDEX deliveries_by_key ON deliveries (subscription, key, seq) WHERE key IS NOT NULL;

-- Dead letters. `message` is the whole message as JSON, because retention may delete the message itself.
CREATE TABLE dead_letters (
    id            INTEGER PRIMARY KEY AUTOINCREMENT,
    subscription  TEXT NOT NULL,
    seq           INTEGER NOT NULL,
    topic         TEXT NOT NULL,
    type          TEXT,
    reason        TEXT NOT NULL,
    attempts      INTEGER NOT NULL,
    died_at       INTEGER NOT NULL,
    error         TEXT,
    stack         TEXT,
    handler       TEXT,
    redrives      INTEGER NOT NULL,
    redriving     INTEGER NOT NULL,
    redrive_error TEXT,
    message       TEXT NOT NULL
) STRICT;
CREATE INDEX dead_letters_by_seq ON dead_letters (seq);

-- Messages that retention deleted before a subscription settled them. `told`: the subscription was notified.
CREATE TABLE gaps (
    number       INTEGER PRIMARY KEY,
    subscription TEXT NOT NULL,
    from_seq     INTEGER NOT NULL,
    to_seq       INTEGER NOT NULL,
    count        INTEGER NOT NULL,
    why          TEXT NOT NULL,
    at           INTEGER NOT NULL,
    told         INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX gaps_by_subscription ON gaps (subscription, told);

-- Retention policies; `limits` is JSON.
CREATE TABLE retention (
    pattern TEXT NOT NULL,
    dialect TEXT NOT NULL,
    limits  TEXT NOT NULL,
    PRIMARY KEY (pattern, dialect)
) STRICT, WITHOUT ROWID;

-- Counts of the messages up to the seq `counted_to`, by topic. Later messages are counted on request.
CREATE TABLE topic_counts (
    topic             TEXT PRIMARY KEY,
    count             INTEGER NOT NULL,
    bytes             INTEGER NOT NULL,
    last_seq          INTEGER NOT NULL,
    last_published_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- Runs of seqs that retention deleted, so that the audit tells a deletion from a loss. No two runs overlap or touch.
CREATE TABLE pruned (
    from_seq INTEGER PRIMARY KEY,
    to_seq   INTEGER NOT NULL
) STRICT;

-- The last batch of a Spark stream, position of an import or occurrence of a schedule, so that a repeat is not stored.
CREATE TABLE sinks (
    sink  TEXT PRIMARY KEY,
    batch INTEGER NOT NULL,
    at    INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- Histograms by hour of the times from publish to delivery and to ack: `count` messages reached the `stage` 'deliver' or
-- 'ack' in a time of this bucket (delivery/histogram.py).
CREATE TABLE timings (
    subscription TEXT NOT NULL,
    hour         INTEGER NOT NULL,
    stage        TEXT NOT NULL,
    bucket       INTEGER NOT NULL,
    count        INTEGER NOT NULL,
    PRIMARY KEY (subscription, hour, stage, bucket)
) STRICT, WITHOUT ROWID;
CREATE INDEX timings_by_hour ON timings (hour);

-- The log's figures over time, as JSON, for the console. Each `step`, the milliseconds between two samples, has a ring of
-- rows, of which the oldest is replaced (broker/history.py).
CREATE TABLE samples (
    step    INTEGER NOT NULL,
    slot    INTEGER NOT NULL,
    at      INTEGER NOT NULL,
    figures TEXT NOT NULL,
    PRIMARY KEY (step, slot)
) STRICT, WITHOUT ROWID;

-- Leases, such as that of maintenance, and schedules: `owner` is then the publisher and the timetable as JSON.
CREATE TABLE leases (
    resource TEXT PRIMARY KEY,
    owner    TEXT NOT NULL,
    fence    INTEGER NOT NULL,
    until    INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- Facts about the log itself: schema_version, salt, created_at, counted_to.
CREATE TABLE headwater (
    name  TEXT PRIMARY KEY,
    value INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- All messages with their ids, for plain SQL. A message without an explicit id has a UUIDv7 made of its time, the log's
-- salt and its seq.
CREATE VIEW history AS
SELECT
    seq, coalesce(id, printf(
        '%08x-%04x-7%03x-%04x-%012x', published_at >> 16, published_at & 65535,
        (SELECT value FROM headwater WHERE name = 'salt') >> 14,
        32768 | ((SELECT value FROM headwater WHERE name = 'salt') & 16383), seq
    )) AS id,
    topic, data, type, version, "from", "to", reply_to, correlation_id, content_type, traceparent, headers, priority,
    deliver_at, expires_at, published_at, size
FROM messages;
