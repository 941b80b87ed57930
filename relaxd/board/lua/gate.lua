-- Set the gate. ARGV: term, open (0 or 1), oldest version on any engine that takes prompts (or empty).
local term = tonumber(ARGV[1])
local current = call('HGET', STATE, 'coordinator_term')
if not current then return fail('RUNMISSING the run is not on the board') end
if term < tonumber(current) then return fail('FENCED term ' .. term .. ' is over: ' .. current .. ' coordinates') end
call('HSET', STATE, 'coordinator_term', term, 'gate_open', ARGV[2], 'oldest_version', ARGV[3])
return 1
