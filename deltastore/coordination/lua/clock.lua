-- Keyspace: none. The only source of time in every script: Redis TIME in whole milliseconds.
-- A caller's clock may be stepped or wrong; this one is the same for everybody.
local function now_ms()
  local t = redis.call('TIME')
  return tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end
