-- Begins every script of the directory: how a block's record is read. Records lie in one hash, by the block's key; numbers are
-- little-endian.
--
--   tenant  scope  model   flushes    node  tier  epoch    node  tier  epoch   ...
--   4       4      4       4          4     1     6        4     1     6
--
-- `flushes`: how often the pool had been flushed when the record was written. Tenant, scope and model are hashes: two that
-- collide are flushed together, which costs a few hits and nothing else. A node has a number per registration.
--
-- Others may have written here too. What cannot be ours is passed over or removed, and counted: every script returns that count first.
local OWNER, HEAD, REPLICA, MOST = 12, 16, 11, 8
local MOST_NODES, MOST_STATE, MOST_PARTS = 4096, 4096, 1048576
-- Flushes that are remembered, how long the words of one are, and where in them their number is (see `baton.seal`).
local MOST_FLUSHES, MOST_WORDS, SEALED_AT = 64, 8192, 33
local refused = 0

local prefix = ARGV[1]
local blocks, nodes = prefix .. ':blocks', prefix .. ':nodes'

-- Removes a key that is of another type than ours; whether there is one of ours.
local function is_of(key, wanted)
  local kind = redis.call('TYPE', key)
  kind = kind.ok or kind
  if kind == wanted or kind == 'none' then return kind == wanted end
  redis.call('DEL', key)
  refused = refused + 1
  return false
end

-- A counter's value, from 0 to what four bytes hold.
local function counter(key)
  if not is_of(key, 'string') then return 0 end
  local text = redis.call('GETRANGE', key, 0, 10)
  if #text <= 10 and string.find(text, '^%d+$') and tonumber(text) < 4294967295 then return tonumber(text) end
  redis.call('DEL', key)
  refused = refused + 1
  return 0
end

is_of(blocks, 'hash')
if is_of(nodes, 'hash') and redis.call('HLEN', nodes) > MOST_NODES then
  redis.call('DEL', nodes)
  refused = refused + 1
end

local function number(text, at)
  local a, b, c, d = string.byte(text, at, at + 3)
  return a + b * 256 + c * 65536 + d * 16777216
end

local function text4(value)
  return string.char(value % 256, math.floor(value / 256) % 256,
    math.floor(value / 65536) % 256, math.floor(value / 16777216) % 256)
end

-- The pieces `first` to `last`, counted from 1, of a text of pieces of `size` bytes, the first 16 bytes of each: keys.
local function keys_of(text, size, first, last)
  local keys, sub = {}, string.sub
  for i = first, last do
    keys[#keys + 1] = sub(text, (i - 1) * size + 1, (i - 1) * size + 16)
  end
  return keys
end

-- Whether the node with this number has a lease.
local lives_by_number = {}
local function lives(node)
  local known = lives_by_number[node]
  if known == nil then
    known = #node == 4 and is_of(prefix .. ':n:' .. node, 'string')
    lives_by_number[node] = known
  end
  return known
end

local ANY = '\0\0\0\0'
local flushes = counter(prefix .. ':flushes')
-- The latest flushes, the last one first: each is tenant, scope and model; ANY in a place means any.
local latest_flushes = nil

-- Whether what a record says was flushed since it was written.
local function is_flushed(record)
  local missed = flushes - number(record, OWNER + 1)
  if missed <= 0 then return false end
  if latest_flushes == nil then
    latest_flushes = is_of(prefix .. ':flush', 'list') and redis.call('LRANGE', prefix .. ':flush', 0, MOST_FLUSHES - 1) or {}
  end
  if missed > #latest_flushes then return true end
  local owner = { string.sub(record, 1, 4), string.sub(record, 5, 8), string.sub(record, 9, 12) }
  for i = 1, missed do
    local covers = true
    for part = 1, 3 do
      local wanted = string.sub(latest_flushes[i], part * 4 - 3, part * 4)
      if wanted ~= ANY and wanted ~= owner[part] then covers = false end
    end
    if covers then return true end
  end
  return false
end

local now = text4(flushes)

-- The replicas of a record on living nodes, but for those of node `except`; '' where there are none.
local function living_replicas(record, except)
  if not record then return '' end
  if #record <= HEAD or (#record - HEAD) % REPLICA ~= 0 or #record > HEAD + MOST * REPLICA then
    refused = refused + 1
    return ''
  end
  if string.sub(record, OWNER + 1, HEAD) ~= now and is_flushed(record) then return '' end
  local living, all = {}, true
  for at = HEAD + 1, #record, REPLICA do
    local node = string.sub(record, at, at + 3)
    if node ~= except and lives(node) then
      living[#living + 1] = string.sub(record, at, at + REPLICA - 1)
    else
      all = false
    end
  end
  if all then return string.sub(record, HEAD + 1) end
  return table.concat(living)
end

-- The words of the latest flushes, the last one first.
local function latest_words()
  local key, words = prefix .. ':flush_words', {}
  if not is_of(key, 'list') then return words end
  for _, sealed in ipairs(redis.call('LRANGE', key, 0, MOST_FLUSHES - 1)) do
    if #sealed <= MOST_WORDS then words[#words + 1] = sealed else refused = refused + 1 end
  end
  return words
end
