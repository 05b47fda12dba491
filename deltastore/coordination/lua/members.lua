-- Keyspace: membership, read only. One consistent picture of the fleet.
-- KEYS actors status alive seen
-- ARGV none
-- Result: {now_ms, then per actor: record, status or '', alive until ms, last heartbeat ms}.
local out = {now_ms()}
for _, actor in ipairs(redis.call('HKEYS', K.actors)) do
  out[#out + 1] = redis.call('HGET', K.actors, actor)
  out[#out + 1] = redis.call('HGET', K.status, actor) or ''
  out[#out + 1] = tonumber(redis.call('ZSCORE', K.alive, actor) or 0)
  out[#out + 1] = tonumber(redis.call('ZSCORE', K.seen, actor) or 0)
end
return out
