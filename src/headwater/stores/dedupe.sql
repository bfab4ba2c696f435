-- Each statement has a name and a line of purpose; SQLite and PostgreSQL both read them. An entry with `until_ms` is a
-- claim that lasts until then; one without is done. `turn` grows with each that is done, whatever the clock says.

-- :begin: the unique insert that decides; also takes a claim that ran out, and an entry that is too old to count. No row
-- if there is one that counts
INSERT INTO dedupe (handler, id, owner, until_ms, at_ms, turn)
VALUES (:handler, :id, :owner, :until_ms, :now_ms,
        (SELECT coalesce(max(turn), 0) + 1 FROM dedupe WHERE handler = :handler AND until_ms IS NULL))
ON CONFLICT (handler, id) DO UPDATE
SET owner = excluded.owner, until_ms = excluded.until_ms, at_ms = excluded.at_ms, turn = excluded.turn
WHERE coalesce(dedupe.until_ms <= :now_ms, dedupe.at_ms <= :forgotten_ms)
RETURNING 'first'

-- :known: the answer if there is an entry
SELECT CASE WHEN until_ms IS NULL THEN 'done' ELSE 'busy' END FROM dedupe WHERE handler = :handler AND id = :id

-- :extend: an own claim lasts longer
UPDATE dedupe SET until_ms = :until_ms
WHERE handler = :handler AND id = :id AND owner = :owner AND until_ms IS NOT NULL
RETURNING 1

-- :finish: done, whichever owner began it
INSERT INTO dedupe (handler, id, owner, until_ms, at_ms, turn)
VALUES (:handler, :id, :owner, NULL, :now_ms,
        (SELECT coalesce(max(turn), 0) + 1 FROM dedupe WHERE handler = :handler AND until_ms IS NULL))
ON CONFLICT (handler, id) DO UPDATE SET until_ms = NULL, at_ms = excluded.at_ms, turn = excluded.turn

-- :release: an own claim is given up
DELETE FROM dedupe WHERE handler = :handler AND id = :id AND owner = :owner AND until_ms IS NOT NULL

-- :contains: whether it was done lately
SELECT 1 FROM dedupe WHERE handler = :handler AND id = :id AND until_ms IS NULL AND at_ms > :forgotten_ms

-- :entries: those of a handler, the oldest first
SELECT id, at_ms, until_ms FROM dedupe
WHERE handler = :handler AND (until_ms IS NOT NULL OR at_ms > :forgotten_ms)
ORDER BY at_ms, position

-- :totals: by handler: done, begun, the oldest
SELECT handler, count(*) - count(until_ms), count(until_ms), min(at_ms) FROM dedupe
WHERE until_ms IS NOT NULL OR at_ms > :forgotten_ms
GROUP BY handler

-- :forget_surplus: those done first, beyond the limit
DELETE FROM dedupe WHERE position IN (
    SELECT position FROM dedupe WHERE handler = :handler AND until_ms IS NULL
    ORDER BY turn DESC, position DESC LIMIT :forget_max OFFSET :max_count
)

-- :forget_old: done too long ago to count
DELETE FROM dedupe WHERE handler = :handler AND until_ms IS NULL AND at_ms <= :forgotten_ms

-- :forget_abandoned: claims that ran out as long ago
DELETE FROM dedupe WHERE handler = :handler AND until_ms <= :forgotten_ms

-- :clear: all of a handler
DELETE FROM dedupe WHERE handler = :handler RETURNING 1

-- :clear_all: all of all
DELETE FROM dedupe RETURNING 1
