-- Return how many groups the gate admits, and what limits them: a word, then numbers. ARGV: NODES, worst-case bytes
-- of a group.
local worst_bytes = tonumber(ARGV[4])
if call('EXISTS', STATE) == 0 then return run_missing() end
local allowed, reason = admission().admit(worst_bytes)
return { allowed, reason }
