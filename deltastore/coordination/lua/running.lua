-- Keyspace: leases, read only. Who holds what until when; the first LIMIT.listed by actor.
-- KEYS leases held
-- ARGV none
-- Result: flat: 'actor:job', the ms after which its result is late.
local out = {}
for _, member in ipairs(redis.call('ZRANGE', K.held, 0, LIMIT.listed - 1)) do
  local id = string.match(member, '^[^:]*:(.*)$')
  out[#out + 1] = member
  out[#out + 1] = tonumber(redis.call('ZSCORE', K.leases, id) or 0)
end
return out
