-- Begins every script of the directory: how a block's record is read. Records lie in one hash, by the block's key; numbers are
-- little-endian.
--
--   tenant  scope  model   flushes    node  tier  epoch    node  tier  epoch   ...
--   4       4      4       4          4     1     6        4     1     6
--
-- `flushes`: how often the pool had been flushed when the record was written. Tenant, scope and model are hashes: two that
-- collide are flushed together, which costs a few hits and nothing else. A node has a number per registration.
local OWNER, HEAD, REPLICA = 12, 16, 11

local prefix = ARGV[1]
local blocks = prefix .. ':blocks'

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
    known = redis.call('EXISTS', prefix .. ':n:' .. node) == 1
    lives_by_number[node] = known
  end
  return known
end

local ANY = '\0\0\0\0'
local flushes = tonumber(redis.call('GET', prefix .. ':flushes') or '0')
-- The latest flushes, the last one first: each is tenant, scope and model; ANY in a place means any.
local latest_flushes = nil

-- Whether what a record says was flushed since it was written.
local function is_flushed(record)
  local missed = flushes - number(record, OWNER + 1)
  if missed <= 0 then return false end
  if latest_flushes == nil then latest_flushes = redis.call('LRANGE', prefix .. ':flush', 0, -1) end
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
