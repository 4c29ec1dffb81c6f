-- Takes a node's lease and number back.
-- ARGV: prefix, node name.
local node = redis.call('HGET', prefix .. ':nodes', ARGV[2])
if node then
  redis.call('DEL', prefix .. ':n:' .. node, prefix .. ':t:' .. node)
  redis.call('HDEL', prefix .. ':nodes', ARGV[2])
end
return 1
