-- Keyspace: jobs, leases, results. The first gate of admission; settle.py is the same predicate.
-- KEYS jobs payloads leases held tokens closing done results admitted outcomes samples counters
-- ARGV job id, token, actor, version, hash, result sha256, result bytes, tokens, region,
--      1 if this repeats a lost call
-- Result: one of the seven answers. First that holds:
--   unknown        no such job
--   duplicate      the job is settled (a repeated call of the admitted one: admitted again)
--   late           the job is closed, or the token is that of an expired lease of it
--   not_holder     no lease on it, or another token, or another actor
--   late           Redis TIME is past the lease or the closing of the step
--   wrong_version  not the version the lease was bound to
--   wrong_hash     not its policy hash
--   admitted
local id, token, actor = ARGV[1], ARGV[2], ARGV[3]
local now = now_ms()
local job = get_job(id)
local claim = token .. ':' .. actor .. ':' .. ARGV[6]

local function decide()
  if not job then return 'unknown' end
  if job.state == 'settled' then return 'duplicate' end
  if job.state == 'closed' then return 'late' end
  if job.token ~= token then
    if job.past and string.find(job.past, token, 1, true) then return 'late' end
    return 'not_holder'
  end
  if job.holder ~= actor then return 'not_holder' end
  if now > deadline_ms(job) then return 'late' end
  if job.version ~= tonumber(ARGV[4]) then return 'wrong_version' end
  if job.hash ~= ARGV[5] then return 'wrong_hash' end
  return 'admitted'
end

local answer = decide()
if answer == 'duplicate' and ARGV[10] == '1' and job.claim == claim then return 'admitted' end
redis.call('HINCRBY', K.outcomes, answer, 1)
if answer == 'admitted' then
  local tokens = tonumber(ARGV[8])
  redis.call('HSET', K.admitted, id, cjson.encode({
    job_id = id, token = token, actor_id = actor, version = job.version, policy_hash = job.hash,
    result_sha256 = ARGV[6], result_bytes = tonumber(ARGV[7]), tokens = tokens,
    region = ARGV[9], granted_ms = job.granted, settled_ms = now}))
  redis.call('ZADD', K.results, redis.call('HINCRBY', K.counters, 'results', 1), id)
  add_sample(actor, now, now - job.granted, tokens, job.counts)
  drop_lease(id, job)
  job.claim = claim
  finish(id, job, 'settled', K.done, now)
end
keep()
return answer
