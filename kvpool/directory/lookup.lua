-- Replicas of the leading blocks of a chain that living nodes hold.
-- ARGV: prefix, keys (16 bytes each). Returns: the number of replicas of each block (a byte each), the replicas, and for
-- each node number among them the node's state.
local keys, num_keys = ARGV[2], #ARGV[2] / 16
local block = prefix .. ':b:'
local BATCH = 256
local ONE = HEAD + REPLICA

local counts, found = {}, {}

-- Notes a record's living replicas; whether there are any. Most records have one, which takes the short way.
local function note(record)
  if not record then return false end
  local replicas
  if #record == ONE and string.sub(record, 1, 4) == now and lives(string.sub(record, HEAD + 1, HEAD + 4)) then
    replicas = string.sub(record, HEAD + 1)
  else
    replicas = living_replicas(record, nil)
    if replicas == '' then return false end
  end
  counts[#counts + 1] = #replicas / REPLICA
  found[#found + 1] = replicas
  return true
end

local function note_batch(first)
  local names = {}
  for i = first, math.min(first + BATCH, num_keys) - 1 do
    names[#names + 1] = block .. string.sub(keys, i * 16 + 1, i * 16 + 16)
  end
  for _, record in ipairs(redis.call('MGET', unpack(names))) do
    if not note(record) then return false end
  end
  return true
end

for first = 0, num_keys - 1, BATCH do
  if not note_batch(first) then break end
end

local bytes = {}
for first = 1, #counts, BATCH do
  bytes[#bytes + 1] = string.char(unpack(counts, first, math.min(first + BATCH - 1, #counts)))
end
local reply = { table.concat(bytes), table.concat(found) }
for node, living in pairs(lives_by_number) do
  if living then
    reply[#reply + 1] = node
    reply[#reply + 1] = redis.call('GET', prefix .. ':n:' .. node)
  end
end
return reply
