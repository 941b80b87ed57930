-- Return the bytes that Redis uses, may use, and may use for surplus groups, and its eviction policy.
-- ARGV: the configured high-water mark, or 0.
local used, max_bytes, high_water = memory(tonumber(ARGV[1]))
local policy = string.match(call('INFO', 'memory'), 'maxmemory_policy:(%S+)')
return { used, max_bytes, high_water, policy }
