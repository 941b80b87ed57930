-- Set the gate. ARGV: epoch, open (0 or 1), oldest version on any engine that takes prompts (or empty).
local epoch = tonumber(ARGV[1])
local current = call('HGET', STATE, 'coordinator_epoch')
if not current then return fail('RUNMISSING the run is not on the board') end
if epoch < tonumber(current) then return fail('FENCED epoch ' .. epoch .. ' is over: ' .. current .. ' coordinates') end
call('HSET', STATE, 'coordinator_epoch', epoch, 'gate_open', ARGV[2], 'oldest_version', ARGV[3])
return 1
