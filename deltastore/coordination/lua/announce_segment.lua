-- Keyspace: segments. Say that home holds a segment of a version that may come to exist.
-- KEYS segments
-- ARGV hint (JSON)
-- Result: how many are kept: the newest, each as its JSON text.
local ok, hints = pcall(cjson.decode, redis.call('GET', K.segments) or '[]')
if not ok or type(hints) ~= 'table' then hints = {} end
local kept = {}
for i = math.max(1, #hints - LIMIT.segments + 2), #hints do kept[#kept + 1] = hints[i] end
kept[#kept + 1] = ARGV[1]
redis.call('SET', K.segments, cjson.encode(kept), 'PX', LIMIT.segments_ttl_ms)
return #kept
