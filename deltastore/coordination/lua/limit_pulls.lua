-- Keyspace: jobs. How much of the open pool each actor may take, until a moment; replaces the last.
-- KEYS pulls
-- ARGV for_ms, then per actor: actor, pull (JSON: left, sharers)
-- Result: 1. Actors that are not named are not limited, nor is anybody afterwards.
local for_ms = tonumber(ARGV[1])
for _, field in ipairs(redis.call('HKEYS', K.pulls)) do redis.call('HDEL', K.pulls, field) end
for i = 2, #ARGV, 2 do redis.call('HSET', K.pulls, ARGV[i], ARGV[i + 1]) end
redis.call('HSET', K.pulls, ':until', string.format('%d', now_ms() + for_ms))
redis.call('PEXPIRE', K.pulls, for_ms)
return 1
