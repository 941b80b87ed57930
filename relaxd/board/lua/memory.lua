-- Bytes that Redis uses, may use at most, and may use for surplus groups; its policy when it is full. ARGV: the high-water
-- mark that is configured, or 0.
local used, most, high_water = memory(tonumber(ARGV[1]))
return { used, most, high_water, string.match(call('INFO', 'memory'), 'maxmemory_policy:(%S+)') }
