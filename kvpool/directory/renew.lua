-- Gives a node a lease. A node that has none, for whatever reason, gets a new number: replicas under an old one stay void. They
-- are swept out by and by: each renewal looks at the next few records. A pool in which no node renews goes as a whole.
-- ARGV: prefix, node name, state, lease in ms, how many flushes it has carried out, life of the records in ms, what tenants have
-- there: apart from the state, which every lookup reads.
-- Returns: whether it got a new number, how many flushes there have been, and the latest of them, the last one first.
local name, state, lease_ms, carried_out = ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local SWEPT = 200
local node = redis.call('HGET', prefix .. ':nodes', name)
local anew = 0
if not node or not lives(node) then
  anew = 1
  node = text4(redis.call('INCR', prefix .. ':number'))
  local known = redis.call('HGETALL', prefix .. ':nodes')
  for i = 1, #known, 2 do
    if not lives(known[i + 1]) then redis.call('HDEL', prefix .. ':nodes', known[i]) end
  end
  redis.call('HSET', prefix .. ':nodes', name, node)
end
redis.call('SET', prefix .. ':n:' .. node, state, 'PX', lease_ms)
if ARGV[7] == '' then
  redis.call('DEL', prefix .. ':t:' .. node)
else
  redis.call('SET', prefix .. ':t:' .. node, ARGV[7], 'PX', lease_ms)
end

local cursor = redis.call('GET', prefix .. ':swept') or '0'
local swept = redis.call('HSCAN', blocks, cursor, 'COUNT', SWEPT)
redis.call('SET', prefix .. ':swept', swept[1])
for i = 1, #swept[2], 2 do
  if living_replicas(swept[2][i + 1], nil) == '' then redis.call('HDEL', blocks, swept[2][i]) end
end
redis.call('PEXPIRE', blocks, ARGV[6])

local missed = math.max(flushes - carried_out, 0)
local reply = { anew, flushes, missed }
if missed > 0 then
  for _, selection in ipairs(redis.call('LRANGE', prefix .. ':flush_words', 0, missed - 1)) do
    reply[#reply + 1] = selection
  end
end
return reply
