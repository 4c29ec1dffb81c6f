-- Takes a node's lease and number back.
-- ARGV: prefix, node name. Returns what was refused.
local node = redis.call('HGET', nodes, ARGV[2])
if node then
  redis.call('DEL', prefix .. ':n:' .. node, prefix .. ':t:' .. node, prefix .. ':f:' .. node)
  redis.call('HDEL', nodes, ARGV[2])
end
return { refused }
