-- Set the gate. ARGV: coordinator's term, open (0 or 1), oldest version on any engine that takes prompts (or empty).
local term, open, oldest_version = tonumber(ARGV[1]), ARGV[2], ARGV[3]
local refused = refuse_coordinator(term)
if refused then return refused end
call('HSET', STATE, 'coordinator_term', term, 'gate_open', open, 'oldest_version', oldest_version)
return 1
