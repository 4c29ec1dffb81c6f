-- Says that a router is here, and answers how many are, and how much there was that no router wrote.
--
-- KEYS[1]  sorted set: routers by the end (ms) of their lease
-- ARGV     the router, the lease (ms); a lease of 0 says that it leaves
local clock = redis.call('TIME')
local now = tonumber(clock[1]) * 1000 + math.floor(tonumber(clock[2]) / 1000)
local lease = tonumber(ARGV[2])
local refused = 0
local kind = redis.call('TYPE', KEYS[1])
kind = kind.ok or kind
if kind ~= 'none' and kind ~= 'zset' then
  redis.call('DEL', KEYS[1])
  refused = 1
end
if lease > 0 then
  redis.call('ZADD', KEYS[1], now + lease, ARGV[1])
  redis.call('PEXPIRE', KEYS[1], 2 * lease)
else
  redis.call('ZREM', KEYS[1], ARGV[1])
end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
refused = refused + redis.call('ZREMRANGEBYSCORE', KEYS[1], now + lease + 3600 * 1000, '+inf')
return { redis.call('ZCARD', KEYS[1]), refused }
