-- Keyspace: the keys a script names in its own KEYS line, as K.<name>; limits as LIMIT.<name>.
-- Prepended to every script (after clock.lua): what a job's states are and how it moves between
-- them, in one place, so that no two scripts disagree.
--
-- A job is JSON in K.jobs: state, gate ["v:hash"], seq, attempt, closes (ms, absent: never), to
-- (dealt to), and while leased: token, holder, version, hash, granted, expires (ms), done, counts.
-- States: open, dealt, leased (live); settled, parked, closed (ended, kept so that late callers
-- get the right answer). Numbers stay below 1e14: cjson writes 14 digits.

local function get_job(id)
  local text = redis.call('HGET', K.jobs, id)
  return text and cjson.decode(text) or nil
end

local function put_job(id, job)
  redis.call('HSET', K.jobs, id, cjson.encode(job))
end

-- The moment after which a leased job's result is late: its lease ends, or its step closes.
local function deadline_ms(job)
  if job.closes and job.closes < job.expires then return job.closes end
  return job.expires
end

local function dealt_member(id, job)
  return job.to .. ':' .. string.format('%016d', job.seq) .. ':' .. id
end

local function dealt_job(member)
  return string.match(member, '^[^:]*:[^:]*:(.*)$')
end

local function to_open(id, job)
  job.state = 'open'
  job.to = nil
  redis.call('ZADD', K.open, job.seq, id)
end

-- End the lease of a leased job; the caller moves the job on.
local function drop_lease(id, job)
  redis.call('ZREM', K.leases, id)
  redis.call('ZREM', K.held, job.holder .. ':' .. id)
  redis.call('HDEL', K.tokens, job.token)
  job.token, job.holder, job.version, job.hash = nil, nil, nil, nil
  job.granted, job.expires, job.done, job.counts = nil, nil, nil, nil
end

-- End a job: settled, parked or closed. Its payload goes, its name stays for late callers.
local function finish(id, job, state, key, now)
  redis.call('ZREM', K.closing, id)
  redis.call('HDEL', K.payloads, id)
  redis.call('ZADD', key, now, id)
  job.state = state
  put_job(id, job)
end

-- Alive by its heartbeat, and neither draining nor poisoned.
local function takes_work(actor, now)
  local until_ms = redis.call('ZSCORE', K.alive, actor)
  if not until_ms or tonumber(until_ms) < now then return false end
  local status = redis.call('HGET', K.status, actor)
  if not status then return false end
  local state = cjson.decode(status).state
  return state == 'active' or state == 'joining'
end

-- Note one lease as a measurement. `at` is strictly increasing per actor: readers use it as cursor.
local function add_sample(actor, now, elapsed, tokens, counts)
  if elapsed < 0 then -- the clock was stepped back meanwhile: this measured nothing
    elapsed, counts = 0, false
  end
  local text = redis.call('HGET', K.samples, actor)
  local list = text and cjson.decode(text) or {}
  local last = list[#list]
  local at = now
  if last and last[1] >= at then at = last[1] + 1 end
  list[#list + 1] = {at, elapsed, tokens, counts and 1 or 0}
  while #list > LIMIT.samples do table.remove(list, 1) end
  redis.call('HSET', K.samples, actor, cjson.encode(list))
end

-- A run nobody touches any more leaves nothing behind. Keys with a TTL of their own are left out.
local function keep()
  for _, key in ipairs(KEYS) do
    if key ~= K.taken and key ~= K.rates and key ~= K.pulls then
      redis.call('PEXPIRE', key, LIMIT.key_ttl_ms)
    end
  end
end
