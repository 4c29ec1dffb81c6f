-- The states of the nodes that live, each followed by what tenants have there; '' where no tenant with a quota has anything.
-- ARGV: prefix. Returns: what was refused, then a state and its parts by turns.
local reply = { 0 }
local known = redis.call('HGETALL', nodes)
for i = 1, #known, 2 do
  local node = known[i + 1]
  if lives(node) then
    reply[#reply + 1] = redis.call('GETRANGE', prefix .. ':n:' .. node, 0, MOST_STATE)
    local parts = prefix .. ':t:' .. node
    reply[#reply + 1] = is_of(parts, 'string') and redis.call('GETRANGE', parts, 0, MOST_PARTS) or ''
  elseif #node ~= 4 then
    redis.call('HDEL', nodes, known[i])
    refused = refused + 1
  end
end
reply[1] = refused
return reply
