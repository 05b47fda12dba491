-- Keyspace: membership, jobs. An actor goes; its share and its leases return to the open pool.
-- KEYS actors status alive seen fresh samples dealt open held leases tokens jobs
-- ARGV actor
-- Result: how many jobs it gave back.
local actor = ARGV[1]
local returned = 0
local low, high = '[' .. actor .. ':', '(' .. actor .. ';' -- ';' follows ':'
for _, member in ipairs(redis.call('ZRANGEBYLEX', K.dealt, low, high)) do
  local id = dealt_job(member)
  local job = get_job(id)
  redis.call('ZREM', K.dealt, member)
  to_open(id, job)
  put_job(id, job)
  returned = returned + 1
end
for _, member in ipairs(redis.call('ZRANGEBYLEX', K.held, low, high)) do
  local id = string.sub(member, #actor + 2)
  local job = get_job(id)
  drop_lease(id, job)
  to_open(id, job)
  put_job(id, job)
  returned = returned + 1
end
redis.call('HDEL', K.actors, actor)
redis.call('HDEL', K.status, actor)
redis.call('ZREM', K.alive, actor)
redis.call('ZREM', K.seen, actor)
redis.call('SREM', K.fresh, actor)
redis.call('HDEL', K.samples, actor)
keep()
return returned
