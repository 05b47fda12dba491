-- Keyspace: jobs, leases. Bind one job to an actor, at its active version, until a moment.
-- KEYS actors status alive fresh open dealt held leases tokens jobs payloads pulls
-- ARGV actor, version, hash, lease_ms, token (random, made by the caller)
-- Result: {job id, payload, granted ms, deadline ms, attempt, counts as sample}, or nil: no work.
-- The same token again returns the same lease while it runs: a lost reply costs nothing.
local actor, version, hash, token = ARGV[1], ARGV[2], ARGV[3], ARGV[5]
local now = now_ms()

local function reply(id, job)
  return {id, redis.call('HGET', K.payloads, id) or '', job.granted, deadline_ms(job),
    job.attempt, job.counts and 1 or 0}
end

local mine = redis.call('HGET', K.tokens, token)
if mine then
  local job = get_job(mine)
  if job.holder == actor and job.version == tonumber(version) and job.hash == hash
      and now <= deadline_ms(job) then
    return reply(mine, job)
  end
  return nil
end
if redis.call('HEXISTS', K.actors, actor) == 0 or not takes_work(actor, now) then return nil end
local low, high = '[' .. actor .. ':', '(' .. actor .. ';' -- ';' follows ':'
local holds = redis.call('ZLEXCOUNT', K.held, low, high)
if holds >= LIMIT.leases_per_actor then return nil end

local wanted = version .. ':' .. hash
local function fits(job)
  if job.closes and job.closes < now then return false end
  for _, entry in ipairs(job.gate) do
    if entry == wanted then return true end
  end
  return false
end

-- What the trainer lets it take of the open pool (limit_pulls), or nil: as much as it likes. With
-- empty hands and nothing left to take, an actor that may share the rest gets another handful: half
-- of its even part, at least one job.
local function pull_limit()
  local text = redis.call('HGET', K.pulls, actor)
  local until_ms = redis.call('HGET', K.pulls, ':until')
  if not text or not until_ms or tonumber(until_ms) < now then return nil end
  local pull = cjson.decode(text)
  if pull.left < 1 and pull.sharers > 0 and holds == 0 then
    pull.left = math.max(1, math.floor(redis.call('ZCARD', K.open) / (2 * pull.sharers)))
  end
  return pull
end

-- Its own share first, then the open pool, each in the order of the offers. Jobs of another gate
-- are stepped over, at most LIMIT.scan of them per pool.
local function find(page_of)
  local offset = 0
  while offset < LIMIT.scan do
    local page = page_of(offset)
    for _, member in ipairs(page) do
      local id = string.find(member, ':', 1, true) and dealt_job(member) or member
      local job = get_job(id)
      if fits(job) then return id, job, member end
    end
    if #page < 64 then return nil end
    offset = offset + 64
  end
  return nil
end

local id, job, member = find(function(offset)
  return redis.call('ZRANGEBYLEX', K.dealt, low, high, 'LIMIT', offset, 64)
end)
if id then
  redis.call('ZREM', K.dealt, member)
else
  local pull = pull_limit()
  if pull and pull.left < 1 then return nil end
  id, job = find(function(offset) return redis.call('ZRANGE', K.open, offset, offset + 63) end)
  if not id then return nil end
  redis.call('ZREM', K.open, id)
  if pull then
    pull.left = pull.left - 1
    redis.call('HSET', K.pulls, actor, cjson.encode(pull))
  end
end

job.state, job.to, job.back = 'leased', nil, nil
job.token, job.holder, job.version, job.hash = token, actor, tonumber(version), hash
job.granted, job.done = now, 0
job.expires = now + tonumber(ARGV[4]) * 2 ^ (job.attempt - 1)
job.counts = redis.call('SREM', K.fresh, actor) == 0
redis.call('ZADD', K.leases, deadline_ms(job), id)
redis.call('ZADD', K.held, 0, actor .. ':' .. id)
redis.call('HSET', K.tokens, token, id)
put_job(id, job)
keep()
return reply(id, job)
