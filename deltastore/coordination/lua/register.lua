-- Keyspace: membership. An actor joins, or joins again after Redis lost it.
-- KEYS actors status alive seen fresh
-- ARGV actor, record (JSON), status (JSON, joining), ttl_ms
-- Result: 1, or 0 when the run has LIMIT.actors already.
local actor = ARGV[1]
if redis.call('HEXISTS', K.actors, actor) == 0
    and redis.call('HLEN', K.actors) >= LIMIT.actors then
  return 0
end
local now = now_ms()
redis.call('HSET', K.actors, actor, ARGV[2])
redis.call('HSET', K.status, actor, ARGV[3])
redis.call('ZADD', K.alive, now + tonumber(ARGV[4]), actor)
redis.call('ZADD', K.seen, now, actor)
redis.call('SADD', K.fresh, actor)
keep()
return 1
