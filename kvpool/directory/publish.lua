-- Takes a node's changes.
-- ARGV: prefix, node name, removed keys (16 bytes each), stored blocks (16 bytes of key, then tenant, scope, model, tier
-- and epoch as in a record). Nothing is taken of a node without a lease, nor a block that a flush covers which the node has yet to
-- carry out: with its next renewal it gives it up. Returns what was refused.
local node = redis.call('HGET', nodes, ARGV[2])
if not node or not lives(node) then return { refused } end
local removed, stored = ARGV[3], ARGV[4]
local NEW = 16 + OWNER + 7
local BATCH = 250
local carried_out = text4(math.min(counter(prefix .. ':f:' .. node), flushes))

-- Keys and records of a batch of pieces of `size` bytes.
local function batch(text, size, first)
  local keys = keys_of(text, size, first, math.min(first + BATCH - 1, #text / size))
  return keys, redis.call('HMGET', blocks, unpack(keys))
end

local function apply(command, arguments)
  if #arguments > 0 then redis.call(command, blocks, unpack(arguments)) end
end

for first = 1, #removed / 16, BATCH do
  local gone, kept = {}, {}
  local keys, records = batch(removed, 16, first)
  for i, key in ipairs(keys) do
    local others = living_replicas(records[i], node)
    if others == '' then
      gone[#gone + 1] = key
    else
      kept[#kept + 1] = key
      kept[#kept + 1] = string.sub(records[i], 1, HEAD) .. others
    end
  end
  apply('HDEL', gone)
  apply('HSET', kept)
end

for first = 1, #stored / NEW, BATCH do
  local written = {}
  local keys, records = batch(stored, NEW, first)
  for i, key in ipairs(keys) do
    local at = (first + i - 2) * NEW
    local others = string.sub(living_replicas(records[i], node), 1, (MOST - 1) * REPLICA)
    local owner = string.sub(stored, at + 17, at + 16 + OWNER)
    if not is_flushed(owner .. carried_out) then
      written[#written + 1] = key
      written[#written + 1] = owner .. now .. others .. node .. string.sub(stored, at + 17 + OWNER, at + NEW)
    end
  end
  apply('HSET', written)
end
return { refused }
