-- Voids what a selection covers: whatever was written before counts by the flushes it has missed.
-- ARGV: prefix, selection as hashes (tenant, scope, model), the same in words, the words of the latest flush as the caller knows
-- them: where there are others nothing is done, and the caller tries again with those.
-- Returns: what was refused, how many flushes there have been or 0 where nothing was done, and the words of the latest flushes.
local words = latest_words()
if (words[1] or '') ~= ARGV[4] then return { refused, 0, unpack(words) } end
for key, value in pairs({ [':flush'] = ARGV[2], [':flush_words'] = ARGV[3] }) do
  is_of(prefix .. key, 'list')
  redis.call('LPUSH', prefix .. key, value)
  redis.call('LTRIM', prefix .. key, 0, MOST_FLUSHES - 1)
end
return { refused, redis.call('INCR', prefix .. ':flushes') }
