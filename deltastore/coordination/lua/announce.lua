-- Keyspace: head. Advertise a version; whoever announces an older one is ignored.
-- KEYS head
-- ARGV version, generation, hint (JSON)
-- Result: 1 if stored, 0 if something newer (generation, then version) is there.
local version, generation = tonumber(ARGV[1]), tonumber(ARGV[2])
local text = redis.call('GET', K.head)
if text then
  local ok, old = pcall(cjson.decode, text)
  if ok and type(old) == 'table' and type(old.generation) == 'number'
      and type(old.version) == 'number' then
    if old.generation > generation then return 0 end
    if old.generation == generation and old.version > version then return 0 end
  end
end
redis.call('SET', K.head, ARGV[3], 'PX', LIMIT.key_ttl_ms)
return 1
