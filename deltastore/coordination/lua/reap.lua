-- Keyspace: jobs, leases, membership. Take back what expired; at most LIMIT.reap jobs per call.
-- KEYS actors status alive seen fresh samples dealt open held leases tokens closing jobs payloads parked closed
-- ARGV none
-- Result: per job: id, actor or '', attempt now, outcome; flat.
local now = now_ms()
local before = '(' .. string.format('%d', now)
local out = {}

local function report(id, actor, attempt, outcome)
  out[#out + 1] = id
  out[#out + 1] = actor or ''
  out[#out + 1] = attempt
  out[#out + 1] = outcome
end

-- 1. Steps that closed. A lease that had run its whole time too is a sample of 0 tokens; one that
--    was cut short by the closing says nothing about speed.
for _, id in ipairs(redis.call('ZRANGEBYSCORE', K.closing, '-inf', before,
    'LIMIT', 0, LIMIT.reap)) do
  local job = get_job(id)
  local actor = job.holder or job.to
  if job.state == 'leased' then
    if job.expires < now then
      add_sample(actor, now, job.expires - job.granted, 0, job.counts)
    end
    drop_lease(id, job)
  elseif job.state == 'dealt' then
    redis.call('ZREM', K.dealt, dealt_member(id, job))
  else
    redis.call('ZREM', K.open, id)
  end
  finish(id, job, 'closed', K.closed, now)
  report(id, actor, job.attempt, 'closed')
end

-- 2. Leases that expired: a sample of 0 tokens, and back to the pool with twice the time.
for _, id in ipairs(redis.call('ZRANGEBYSCORE', K.leases, '-inf', before,
    'LIMIT', 0, LIMIT.reap)) do
  local job = get_job(id)
  if job.expires < now then -- else its step closed: the next call ends it under 1
    local actor = job.holder
    add_sample(actor, now, job.expires - job.granted, 0, job.counts)
    job.past = (job.past and (job.past .. ',') or '') .. job.token
    drop_lease(id, job)
    if job.attempt >= LIMIT.attempts then
      finish(id, job, 'parked', K.parked, now)
      report(id, actor, job.attempt, 'parked')
    else
      job.attempt = job.attempt + 1
      to_open(id, job)
      put_job(id, job)
      report(id, actor, job.attempt, 'reopened')
    end
  end
end

-- 3. Shares dealt to actors that are gone or take nothing more. One look per actor: the range
--    continues after each actor's last member (';' follows ':').
local from, released = '-', 0
while released < LIMIT.reap do
  local first = redis.call('ZRANGEBYLEX', K.dealt, from, '+', 'LIMIT', 0, 1)[1]
  if not first then break end
  local actor = string.match(first, '^[^:]*')
  if not takes_work(actor, now) then
    for _, member in ipairs(redis.call('ZRANGEBYLEX', K.dealt, '[' .. actor .. ':',
        '(' .. actor .. ';', 'LIMIT', 0, LIMIT.reap)) do
      local id = dealt_job(member)
      local job = get_job(id)
      redis.call('ZREM', K.dealt, member)
      to_open(id, job)
      put_job(id, job)
      report(id, actor, job.attempt, 'released')
      released = released + 1
    end
  end
  from = '[' .. actor .. ';'
end

-- 4. Actors lost for so long that nobody asks any more.
for _, actor in ipairs(redis.call('ZRANGEBYSCORE', K.alive, '-inf', now - LIMIT.forget_ms,
    'LIMIT', 0, LIMIT.reap)) do
  redis.call('HDEL', K.actors, actor)
  redis.call('HDEL', K.status, actor)
  redis.call('ZREM', K.alive, actor)
  redis.call('ZREM', K.seen, actor)
  redis.call('SREM', K.fresh, actor)
  redis.call('HDEL', K.samples, actor)
end
if #out > 0 then keep() end
return out
