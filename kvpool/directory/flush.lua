-- Voids what a selection covers: whatever was written before counts by the flushes it has missed.
-- ARGV: prefix, selection as hashes (tenant, scope, model), the same in words, how many flushes are remembered.
-- Returns how many flushes there have been.
local kept = tonumber(ARGV[4])
redis.call('LPUSH', prefix .. ':flush', ARGV[2])
redis.call('LTRIM', prefix .. ':flush', 0, kept - 1)
redis.call('LPUSH', prefix .. ':flush_words', ARGV[3])
redis.call('LTRIM', prefix .. ':flush_words', 0, kept - 1)
return redis.call('INCR', prefix .. ':flushes')
