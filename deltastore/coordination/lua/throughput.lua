-- Keyspace: throughput, read only.
-- KEYS samples rates
-- ARGV none
-- Result: {now_ms, samples (flat: actor, JSON), rates (flat: actor, JSON)}.
return {now_ms(), redis.call('HGETALL', K.samples), redis.call('HGETALL', K.rates)}
