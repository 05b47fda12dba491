-- Keyspace: jobs. Put jobs up; all of this call or none.
-- KEYS jobs payloads open dealt leases closing done parked closed results admitted counters
-- ARGV jobs still to come including these, then per job: id, job (JSON: gate, attempt, and to,
--      closes where given), payload
-- Result: how many were new or opened again; -1 when the run would exceed LIMIT.jobs.
local live = redis.call('ZCARD', K.open) + redis.call('ZCARD', K.dealt)
  + redis.call('ZCARD', K.leases) + redis.call('ZCARD', K.results)
if live + tonumber(ARGV[1]) > LIMIT.jobs then return -1 end
local added = 0
for i = 2, #ARGV, 3 do
  local id, job = ARGV[i], cjson.decode(ARGV[i + 1])
  local old = get_job(id)
  local again = old and (old.state == 'settled' or old.state == 'parked')
    and job.attempt > old.attempt
  if not old or again then
    if again then
      redis.call('ZREM', K.done, id)
      redis.call('ZREM', K.parked, id)
      redis.call('ZREM', K.results, id)
      redis.call('HDEL', K.admitted, id)
      job.past = old.past
    end
    job.seq = redis.call('HINCRBY', K.counters, 'seq', 1)
    if job.to then
      job.state = 'dealt'
      redis.call('ZADD', K.dealt, 0, dealt_member(id, job))
    else
      to_open(id, job)
    end
    if job.closes then redis.call('ZADD', K.closing, job.closes, id) end
    redis.call('HSET', K.payloads, id, ARGV[i + 2])
    put_job(id, job)
    added = added + 1
  end
end
-- Names of ended jobs are kept for late callers, but not for ever: the oldest become unknown.
for _, key in ipairs({K.done, K.parked, K.closed}) do
  local over = redis.call('ZCARD', key) - LIMIT.ended
  if over > 0 then
    for _, id in ipairs(redis.call('ZRANGE', key, 0, math.min(over, 1000) - 1)) do
      redis.call('ZREM', key, id)
      redis.call('HDEL', K.jobs, id)
    end
  end
end
keep()
return added
