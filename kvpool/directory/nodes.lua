-- The states of the nodes that live, each followed by what tenants have there; '' where no tenant with a quota has anything.
-- ARGV: prefix.
local states = {}
for _, node in ipairs(redis.call('HVALS', prefix .. ':nodes')) do
  local state = redis.call('GET', prefix .. ':n:' .. node)
  if state then
    states[#states + 1] = state
    states[#states + 1] = redis.call('GET', prefix .. ':t:' .. node) or ''
  end
end
return states
