-- Keyspace: leases. More time, only for more tokens: a stuck engine must not keep its job.
-- KEYS leases jobs
-- ARGV job id, token, tokens done, lease_ms, max_lease_ms, 1 if this repeats a lost call
-- Result: 1 if extended (or if the lost call had extended it), else 0: the old expiry stands.
local id = ARGV[1]
local job = get_job(id)
if not job or job.state ~= 'leased' or job.token ~= ARGV[2] then return 0 end
local now, done = now_ms(), tonumber(ARGV[3])
if now > deadline_ms(job) then return 0 end
if done <= job.done then return (ARGV[6] == '1' and done == job.done) and 1 or 0 end
local scale = 2 ^ (job.attempt - 1)
local expires = math.min(now + tonumber(ARGV[4]) * scale, job.granted + tonumber(ARGV[5]) * scale)
local extended = expires > job.expires
job.done = done
if extended then job.expires = expires end
redis.call('ZADD', K.leases, deadline_ms(job), id)
put_job(id, job)
return extended and 1 or 0
