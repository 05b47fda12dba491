-- Keyspace: none.
-- KEYS alive
-- ARGV none
-- Result: Redis TIME in ms. (The key only routes the call to the run's node in a cluster.)
return now_ms()
