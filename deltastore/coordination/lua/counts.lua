-- Keyspace: jobs, read only. One consistent picture of the work.
-- KEYS open dealt leases done parked
-- ARGV none
-- Result: {open, dealt, leased, settled, parked}.
return {redis.call('ZCARD', K.open), redis.call('ZCARD', K.dealt), redis.call('ZCARD', K.leases),
  redis.call('ZCARD', K.done), redis.call('ZCARD', K.parked)}
