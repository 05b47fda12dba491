-- Keyspace: settlements, read only.
-- KEYS outcomes
-- ARGV none
-- Result: flat: outcome, how often.
return redis.call('HGETALL', K.outcomes)
