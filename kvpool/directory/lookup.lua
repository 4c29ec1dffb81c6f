-- Replicas of the leading blocks of a chain that living nodes hold.
-- ARGV: prefix, keys (16 bytes each). Returns: what was refused, entries, each as long as a record with one replica, in the order of the chain;
-- which blocks have several of them (number of the block from 0, and how many: 4 bytes each); and for each node number that may
-- stand in an entry the node's state.
-- Most records have one replica and were written since the last flush. Those are passed on as they are, so that a long chain takes
-- next to no Lua: two thirds of the time is Redis' own.
local keys, num_keys = ARGV[2], #ARGV[2] / 16
local BATCH = 250
local ONE = HEAD + REPLICA

-- By flushes and first node of a record with one replica: whether its replica counts.
local counts = setmetatable({}, {
  __index = function(known, stamp)
    known[stamp] = string.sub(stamp, 1, 4) == now and lives(string.sub(stamp, 5, 8))
    return known[stamp]
  end,
})

local several = {}

-- The entries of block number `at`; nil where no node holds it.
local function entries_of(record, at)
  local replicas = living_replicas(record, nil)
  if replicas == '' then return nil end
  local num_replicas = #replicas / REPLICA
  if num_replicas > 1 then several[#several + 1] = text4(at) .. text4(num_replicas) end
  local entries, head = {}, string.sub(record, 1, HEAD)
  for first = 1, #replicas, REPLICA do
    entries[#entries + 1] = head .. string.sub(replicas, first, first + REPLICA - 1)
  end
  return table.concat(entries)
end

-- Records of the blocks from number `first` to before `last`. Redis' own `struct` cuts the keys in one call, and says last where it
-- ended, which is no block; servers like Redis may not have it.
local function records_of(first, last)
  if not rawget(_G, 'struct') then return redis.call('HMGET', blocks, unpack(keys_of(keys, 16, first + 1, last))) end
  local cut = string.rep('c16', last - first)
  local records = redis.call('HMGET', blocks, struct.unpack(cut, keys, first * 16 + 1))
  records[#records] = nil
  return records
end

-- Entries of a batch of blocks from number `first` on, and whether all of them are held.
local function entries_of_batch(first)
  local last = math.min(first + BATCH, num_keys)
  local records = records_of(first, last)
  local sub = string.sub
  for i = 1, #records do
    local record = records[i]
    if not (record and #record == ONE and counts[sub(record, 13, 20)]) then
      local entries = entries_of(record, first + i - 1)
      if not entries then return table.concat(records, '', 1, i - 1), false end
      records[i] = entries
    end
  end
  return table.concat(records), true
end

local found = {}
for first = 0, num_keys - 1, BATCH do
  local entries, all = entries_of_batch(first)
  found[#found + 1] = entries
  if not all then break end
end

local reply = { refused, table.concat(found), table.concat(several) }
for node, living in pairs(lives_by_number) do
  if living then
    reply[#reply + 1] = node
    reply[#reply + 1] = redis.call('GETRANGE', prefix .. ':n:' .. node, 0, MOST_STATE)
  end
end
return reply
