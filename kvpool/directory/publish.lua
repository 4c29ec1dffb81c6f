-- Takes a node's changes.
-- ARGV: prefix, node name, life of a record in ms, removed keys (16 bytes each), stored blocks (16 bytes of key, then tenant,
-- scope, model, size, tier and epoch as in a record). Returns 0 where the node has no lease: nothing is taken then.
local node = redis.call('HGET', prefix .. ':nodes', ARGV[2])
if not node or not lives(node) then return 0 end
local life_ms, removed, stored = ARGV[3], ARGV[4], ARGV[5]
local NEW = 16 + 16 + 7
local MOST = 8

for at = 1, #removed, 16 do
  local name = prefix .. ':b:' .. string.sub(removed, at, at + 15)
  local record = redis.call('GET', name)
  if record then
    local others = living_replicas(record, node)
    if others == '' then
      redis.call('DEL', name)
    else
      redis.call('SET', name, string.sub(record, 1, HEAD) .. others, 'KEEPTTL')
    end
  end
end

for at = 1, #stored, NEW do
  local name = prefix .. ':b:' .. string.sub(stored, at, at + 15)
  local others = string.sub(living_replicas(redis.call('GET', name), node), 1, (MOST - 1) * REPLICA)
  local head = now .. string.sub(stored, at + 16, at + 31)
  local mine = node .. string.sub(stored, at + 32, at + NEW - 1)
  redis.call('SET', name, head .. others .. mine, 'PX', life_ms)
end
return 1
