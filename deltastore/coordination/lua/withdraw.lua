-- Keyspace: jobs, leases, results. A step closes: its jobs end, whatever their state.
-- KEYS jobs payloads open dealt held leases tokens closing parked closed results admitted
-- ARGV job ids
-- Result: how many were open, dealt or leased.
local now = now_ms()
local live = 0
for _, id in ipairs(ARGV) do
  local job = get_job(id)
  if job and job.state ~= 'closed' then
    if job.state == 'leased' then
      drop_lease(id, job)
      live = live + 1
    elseif job.state == 'dealt' then
      redis.call('ZREM', K.dealt, dealt_member(id, job))
      live = live + 1
    elseif job.state == 'open' then
      redis.call('ZREM', K.open, id)
      live = live + 1
    elseif job.state == 'parked' then
      redis.call('ZREM', K.parked, id)
    end
    redis.call('ZREM', K.results, id)
    redis.call('HDEL', K.admitted, id)
    -- A settled job stays settled: its copies are duplicates, and it can still be opened again.
    if job.state ~= 'settled' then finish(id, job, 'closed', K.closed, now) end
  end
end
keep()
return live
