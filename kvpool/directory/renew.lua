-- Gives a node a lease. A node that has none, for whatever reason, gets a new number: replicas under an old one stay void. They
-- are swept out by and by: each renewal looks at the next few records. A pool in which no node renews goes as a whole.
-- ARGV: prefix, node name, state, lease in ms, number of the latest flush that it has carried out (8 bytes), life of the records in
-- ms, what tenants have there: apart from the state, which every lookup reads.
-- Returns: what was refused, whether it got a new number, and the words of the latest flushes, the last one first; none of them where
-- the node has carried out the last one.
local name, state, lease_ms, carried_out = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local SWEPT = 200
local node = redis.call('HGET', nodes, name)
local anew = 0
if not node or not lives(node) then
  anew = 1
  counter(prefix .. ':number')
  repeat
    node = text4(redis.call('INCR', prefix .. ':number'))
  until not lives(node)
  local known = redis.call('HGETALL', nodes)
  for i = 1, #known, 2 do
    if not lives(known[i + 1]) then redis.call('HDEL', nodes, known[i]) end
  end
  redis.call('HSET', nodes, name, node)
end
redis.call('SET', prefix .. ':n:' .. node, state, 'PX', lease_ms)
redis.call('SET', prefix .. ':f:' .. node, flushes, 'PX', lease_ms) -- it carries out all of them before it publishes anything
if ARGV[7] == '' then
  redis.call('DEL', prefix .. ':t:' .. node)
else
  redis.call('SET', prefix .. ':t:' .. node, ARGV[7], 'PX', lease_ms)
end

local cursor = is_of(prefix .. ':swept', 'string') and redis.call('GETRANGE', prefix .. ':swept', 0, 19) or '0'
if not string.find(cursor, '^%d+$') or #cursor > 19 then cursor, refused = '0', refused + 1 end
local swept = redis.call('HSCAN', blocks, cursor, 'COUNT', SWEPT)
redis.call('SET', prefix .. ':swept', swept[1])
for i = 1, #swept[2], 2 do
  if living_replicas(swept[2][i + 1], nil) == '' then redis.call('HDEL', blocks, swept[2][i]) end
end
redis.call('PEXPIRE', blocks, ARGV[6])

local words = latest_words()
if words[1] and string.sub(words[1], SEALED_AT, SEALED_AT + 7) == carried_out then words = {} end
return { refused, anew, unpack(words) }
