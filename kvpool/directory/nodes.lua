-- The states of the nodes that live.
-- ARGV: prefix.
local states = {}
for _, node in ipairs(redis.call('HVALS', prefix .. ':nodes')) do
  local state = redis.call('GET', prefix .. ':n:' .. node)
  if state then states[#states + 1] = state end
end
return states
