-- Keyspace: throughput. Averages, each with its own end of life.
-- KEYS rates
-- ARGV ttl_ms, then per actor: actor, rate (decimal text)
-- Result: 1. The whole key expires with the longest-lived average (CASE L2).
local now, ttl = now_ms(), tonumber(ARGV[1])
for i = 2, #ARGV, 2 do
  redis.call('HSET', K.rates, ARGV[i],
    '{"rate":' .. ARGV[i + 1] .. ',"expires_ms":' .. string.format('%d', now + ttl) .. '}')
end
if redis.call('PTTL', K.rates) < ttl then redis.call('PEXPIRE', K.rates, ttl) end
-- Averages of actors that never came back do not pile up.
if redis.call('HLEN', K.rates) > LIMIT.actors then
  local all = redis.call('HGETALL', K.rates)
  for i = 1, #all, 2 do
    if cjson.decode(all[i + 1]).expires_ms < now then redis.call('HDEL', K.rates, all[i]) end
  end
end
return 1
