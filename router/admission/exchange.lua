-- Puts a router's message down and answers with those of the others.
-- KEYS[1]  hash: a field per router
-- ARGV     this router, its message, life of the hash (ms), the most routers, the longest message
-- Returns how much was removed that no router wrote, then names and messages by turns.
local name, message, life = ARGV[1], ARGV[2], ARGV[3]
local most_routers, longest = tonumber(ARGV[4]), tonumber(ARGV[5])
local refused = 0
local kind = redis.call('TYPE', KEYS[1])
kind = kind.ok or kind
if (kind ~= 'none' and kind ~= 'hash') or (kind == 'hash' and redis.call('HLEN', KEYS[1]) > most_routers) then
  redis.call('DEL', KEYS[1])
  refused = 1
end
redis.call('HSET', KEYS[1], name, message)
redis.call('PEXPIRE', KEYS[1], life)
local reply = { 0 }
for _, other in ipairs(redis.call('HKEYS', KEYS[1])) do
  if #other > 64 or redis.call('HSTRLEN', KEYS[1], other) > longest then
    redis.call('HDEL', KEYS[1], other)
    refused = refused + 1
  elseif other ~= name then
    reply[#reply + 1] = other
    reply[#reply + 1] = redis.call('HGET', KEYS[1], other)
  end
end
reply[1] = refused
return reply
