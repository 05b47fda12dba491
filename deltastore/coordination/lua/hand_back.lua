-- Keyspace: jobs, leases. The holder returns a job unfinished; no sample, no attempt used.
-- KEYS open held leases tokens jobs
-- ARGV job id, token
-- Result: 1 if handed back now or by an earlier call with this token, else 0.
local id = ARGV[1]
local job = get_job(id)
if not job then return 0 end
if job.state ~= 'leased' then return job.back == ARGV[2] and 1 or 0 end
if job.token ~= ARGV[2] then return 0 end
drop_lease(id, job)
to_open(id, job)
job.back = ARGV[2]
put_job(id, job)
keep()
return 1
