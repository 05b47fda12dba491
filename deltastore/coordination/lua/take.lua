-- Keyspace: results. The trainer takes the oldest admitted results.
-- KEYS results admitted taken
-- ARGV how many at most, token (random, made by the caller)
-- Result: their JSON texts. The same token again returns the same ones: a lost reply loses none.
local text = redis.call('GET', K.taken)
if text then
  local last = cjson.decode(text)
  if last.token == ARGV[2] then return last.items end
end
local items = {}
local ids = redis.call('ZRANGE', K.results, 0, tonumber(ARGV[1]) - 1)
for _, id in ipairs(ids) do
  items[#items + 1] = redis.call('HGET', K.admitted, id) or ''
  redis.call('ZREM', K.results, id)
  redis.call('HDEL', K.admitted, id)
end
if #items > 0 then
  redis.call('SET', K.taken, cjson.encode({token = ARGV[2], items = items}),
    'PX', LIMIT.taken_ttl_ms)
end
return items
