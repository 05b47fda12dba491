-- Keyspace: membership. A known actor says that it lives, and how it is.
-- KEYS actors status alive seen
-- ARGV actor, status (JSON), ttl_ms
-- Result: 1, or 0 when nobody knows the actor (Redis restarted empty): it registers again.
local actor = ARGV[1]
if redis.call('HEXISTS', K.actors, actor) == 0 then return 0 end
local now = now_ms()
redis.call('HSET', K.status, actor, ARGV[2])
redis.call('ZADD', K.alive, now + tonumber(ARGV[3]), actor)
redis.call('ZADD', K.seen, now, actor)
keep()
return 1
