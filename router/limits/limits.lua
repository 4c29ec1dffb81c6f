-- The counts of one tenant, shared by all routers. One call is one step: nobody sees half of it.
--
-- KEYS[1]  hash: `requests` and `tokens`, the level of each bucket, and `at`, when (ms) it was that
-- KEYS[2]  sorted set: requests in flight by the end (ms) of their lease; a router that died renews none
-- KEYS[3]  hash: the tokens that each of those was charged, also where the answer came too late
-- ARGV     what to do, the grant, an amount, the lease (ms), then the limits, -1 for none: capacity and rate per ms of
--          requests, the same of tokens, requests in flight; after them, for `renew`, the grants, and for `leave` the
--          tokens that its router knows to have been charged: here they go with a lease that was not renewed in time
--
-- Time is the server's, so that routers need not agree on theirs. If it is set back nothing is given until it has passed
-- again, an hour at most; if it is set forward a bucket is full at most.
--
-- Others may have written here too. A key of another type goes; a level that is no number, or a debt that no request makes, is
-- none, and such a bucket is full like an unknown one; times further ahead than a clock is set back do not count. The last field of
-- each answer says how much of that there was.
local FAR, MOST_DEBT, MOST_WAIT = 3600 * 1000, 1e9, 1e12
local what, grant, amount, lease = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local sizes = {
  requests = { capacity = tonumber(ARGV[5]), rate = tonumber(ARGV[6]) },
  tokens = { capacity = tonumber(ARGV[7]), rate = tonumber(ARGV[8]) },
}
local max_concurrency = tonumber(ARGV[9])
local clock = redis.call('TIME')
local now = tonumber(clock[1]) * 1000 + math.floor(tonumber(clock[2]) / 1000)

local refused = 0
for index, wanted in ipairs({ 'hash', 'zset', 'hash' }) do
  local kind = redis.call('TYPE', KEYS[index])
  kind = kind.ok or kind
  if kind ~= 'none' and kind ~= wanted then
    redis.call('DEL', KEYS[index])
    refused = refused + 1
  end
end

-- What was stored, or `otherwise` where it is not between `least` and `most`; NaN is between none.
local function within(text, least, most, otherwise)
  local value = text and tonumber(text)
  if value and value >= least and value <= most then return value end
  if text then refused = refused + 1 end
  return otherwise
end

local stored = redis.call('HMGET', KEYS[1], 'requests', 'tokens', 'at')
local elapsed = math.max(0, now - within(stored[3], 0, now + FAR, now))
local levels = {}
for index, name in ipairs({ 'requests', 'tokens' }) do
  local size = sizes[name]
  local level = within(stored[index], -MOST_DEBT, MOST_DEBT * 1e6, size.capacity)
  levels[name] = math.min(level + elapsed * size.rate, size.capacity)
end

local function number(value)
  return string.format('%.17g', value)
end

-- A bucket that nobody touches until it is full again may as well be gone: an unknown one is full.
local function save()
  local rest = 1000
  for name, size in pairs(sizes) do
    if size.rate > 0 then
      rest = math.max(rest, (size.capacity - levels[name]) / size.rate)
    end
  end
  redis.call('HSET', KEYS[1], 'requests', number(levels.requests), 'tokens', number(levels.tokens), 'at', now)
  redis.call('PEXPIRE', KEYS[1], math.min(math.ceil(rest) + 1000, 1e13))
end

local function answer(granted, kind, wait)
  local running = redis.call('ZCARD', KEYS[2])
  return { granted, kind, number(wait), number(levels.requests), number(levels.tokens), running, refused }
end

-- Milliseconds to wait for `wanted`, or 0 and it is taken. What can never be there is given when the bucket is full.
local function take(name, wanted)
  local size = sizes[name]
  if size.capacity < 0 then
    return 0
  end
  local missing = math.min(wanted, size.capacity) - levels[name]
  if missing > 1e-6 then
    return math.min(missing / size.rate, MOST_WAIT)
  end
  levels[name] = levels[name] - wanted
  save()
  return 0
end

local function hold(name)
  redis.call('ZADD', KEYS[2], now + lease, name)
  redis.call('PEXPIRE', KEYS[2], 2 * lease)
  redis.call('PEXPIRE', KEYS[3], 2 * lease)
end

-- Ends the leases between `from` and `to`; how many there were.
local function drop(from, to)
  local names = redis.call('ZRANGEBYSCORE', KEYS[2], from, to)
  for _, name in ipairs(names) do
    redis.call('HDEL', KEYS[3], name)
  end
  redis.call('ZREMRANGEBYSCORE', KEYS[2], from, to)
  return #names
end

if refused > 0 then save() end
drop('-inf', now)
refused = refused + drop(now + lease + FAR, '+inf')

local function charged()
  return within(redis.call('HGET', KEYS[3], grant), 0, MOST_DEBT * 1e6, 0)
end

if what == 'enter' then
  if redis.call('ZSCORE', KEYS[2], grant) then
    return answer(1, '', 0)
  end
  if max_concurrency >= 0 and redis.call('ZCARD', KEYS[2]) >= max_concurrency then
    return answer(0, 'concurrency', 0)
  end
  local wait = take('requests', amount)
  if wait > 0 then
    return answer(0, 'requests', wait)
  end
  hold(grant)
  return answer(1, '', 0)
end

if what == 'charge' then
  local wait = take('tokens', amount)
  if wait == 0 and redis.call('ZSCORE', KEYS[2], grant) then
    redis.call('HSET', KEYS[3], grant, number(charged() + amount))
    redis.call('PEXPIRE', KEYS[3], 2 * lease)
  end
  return answer(wait > 0 and 0 or 1, wait > 0 and 'tokens' or '', wait)
end

if what == 'leave' then
  local unused = math.max(charged(), tonumber(ARGV[10])) - amount
  redis.call('HDEL', KEYS[3], grant)
  if redis.call('ZREM', KEYS[2], grant) == 1 and unused ~= 0 and sizes.tokens.capacity >= 0 then
    levels.tokens = math.min(levels.tokens + unused, sizes.tokens.capacity)
    save()
  end
  return answer(1, '', 0)
end

if what == 'renew' then
  for index = 10, #ARGV do
    hold(ARGV[index])
  end
end
return answer(1, '', 0)
