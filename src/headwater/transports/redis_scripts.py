"""What Redis has to do in one go, as scripts that run inside it: nothing else happens in between, and after a crash all
of one is there or nothing. Where a command in a script can fail, it stands before what would hide the failure."""

from __future__ import annotations

# Add messages that are not known yet; an id is known while its key lives. The key is written after the entry: if the
# entry is refused, the message must not count as there.
# KEYS: stream, then one key per id. ARGV: maxlen (0: none), dedupe ms (0: none), then id, topic, type, doc of each.
ADD = """
local added = 0
for n = 0, (#ARGV - 2) / 4 - 1 do
    local at = 3 + n * 4
    local known = ARGV[2] ~= '0' and redis.call('EXISTS', KEYS[2 + n]) == 1
    if not known then
        local fields = {'id', ARGV[at], 'topic', ARGV[at + 1], 'type', ARGV[at + 2], 'doc', ARGV[at + 3]}
        local entry
        if ARGV[1] == '0' then
            entry = redis.call('XADD', KEYS[1], '*', unpack(fields))
        else
            entry = redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', unpack(fields))
        end
        if ARGV[2] ~= '0' then
            redis.call('SET', KEYS[2 + n], entry, 'PX', ARGV[2])
        end
        added = added + 1
    end
end
return added
"""

# Keep entries that are being handled from being reclaimed. Answers with those that are not this consumer's any more.
# KEYS: stream. ARGV: group, consumer, then entry ids.
HOLD = """
local lost = {}
for n = 3, #ARGV do
    local pending = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[n], ARGV[n], 1)[1]
    if pending and pending[2] == ARGV[2] then
        redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[n], 'JUSTID')
    else
        lost[#lost + 1] = ARGV[n]
    end
end
return lost
"""

# Give entries back that were read but never handled: reclaimable at once, and this delivery is not counted.
# KEYS: stream. ARGV: group, consumer, idle ms, then entry ids.
RELEASE = """
local released = 0
for n = 4, #ARGV do
    local pending = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[n], ARGV[n], 1)[1]
    if pending and pending[2] == ARGV[2] then
        redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[n],
                   'IDLE', ARGV[3], 'RETRYCOUNT', pending[4] - 1, 'JUSTID')
        released = released + 1
    end
end
return released
"""

# Move one entry to the dead stream, unless another consumer has it by now. Written there before it is acked here.
# KEYS: stream, dead stream. ARGV: group, consumer, entry id, then names and values of the dead entry's fields.
BURY = """
local pending = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1)[1]
if not pending or pending[2] ~= ARGV[2] then
    return 0
end
redis.call('XADD', KEYS[2], '*', unpack(ARGV, 4))
redis.call('XACK', KEYS[1], ARGV[1], ARGV[3])
return 1
"""

# Redis 6.2 keeps entries pending that were deleted from the stream, and claims them as nothing for ever: ack them.
# KEYS: stream. ARGV: group, consumer, how many to look at.
FORGET_DELETED = """
local forgotten = 0
for _, pending in ipairs(redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', ARGV[3], ARGV[2])) do
    if #redis.call('XRANGE', KEYS[1], pending[1], pending[1]) == 0 then
        forgotten = forgotten + redis.call('XACK', KEYS[1], ARGV[1], pending[1])
    end
end
return forgotten
"""

# Remove consumers that nobody has seen for long and that hold nothing: with one look and one deletion apart, what it
# was given in between would be lost.
# KEYS: stream. ARGV: group, idle ms, and the only name to consider or '' for all.
TIDY = """
local removed = 0
for _, told in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
    local consumer = {}
    for n = 1, #told, 2 do
        consumer[told[n]] = told[n + 1]
    end
    if consumer.pending == 0 and consumer.idle >= tonumber(ARGV[2])
       and (ARGV[3] == '' or ARGV[3] == consumer.name) then
        redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], consumer.name)
        removed = removed + 1
    end
end
return removed
"""
