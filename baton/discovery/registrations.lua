-- Registrations of processes, each under a lease that ends by the clock of Redis.
-- KEYS: a hash of registrations, a sorted set with the end of each one's lease in ms.
-- ARGV: what to do, then
--   register   a name, the sealed registration, the lease in ms, the most that there may be: 1 if it was taken, 0 if there are too many
--   withdraw   names: how many there were
--   list       the longest name, the longest registration: how many were malformed, then names and registrations by turns
local registrations, leases = KEYS[1], KEYS[2]
local DAY_MS = 86400000

local function typed(key, kind)
  local found = redis.call('TYPE', key)
  found = found.ok or found
  if found ~= kind and found ~= 'none' then redis.call('DEL', key) end
end

local function withdraw(name)
  redis.call('ZREM', leases, name)
  return redis.call('HDEL', registrations, name)
end

typed(registrations, 'hash')
typed(leases, 'zset')

if ARGV[1] == 'withdraw' then
  local gone = 0
  for i = 2, #ARGV do gone = gone + withdraw(ARGV[i]) end
  return gone
end

local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
-- A lease that ends before now, and one that ends later than any that was given, which the clock or somebody else has changed.
for _, name in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', now_ms)) do withdraw(name) end
for _, name in ipairs(redis.call('ZRANGEBYSCORE', leases, now_ms + DAY_MS, '+inf')) do withdraw(name) end

if ARGV[1] == 'register' then
  local name, most = ARGV[2], tonumber(ARGV[5])
  if redis.call('HEXISTS', registrations, name) == 0 and redis.call('HLEN', registrations) >= most then return 0 end
  redis.call('HSET', registrations, name, ARGV[3])
  redis.call('ZADD', leases, now_ms + tonumber(ARGV[4]), name)
  return 1
end

local reply = { 0 }
for _, name in ipairs(redis.call('HKEYS', registrations)) do
  local fits = #name <= tonumber(ARGV[2]) and redis.call('HSTRLEN', registrations, name) <= tonumber(ARGV[3])
  if fits and redis.call('ZSCORE', leases, name) then
    reply[#reply + 1] = name
    reply[#reply + 1] = redis.call('HGET', registrations, name)
  else
    withdraw(name)
    reply[1] = reply[1] + 1
  end
end
return reply
