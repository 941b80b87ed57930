-- Publish the prompts again whose reward failed, now that it may be repaired. ARGV: coordinator's term. Returns their number.
local term = tonumber(ARGV[1])
local refused = refuse_coordinator(term)
if refused then return refused end
local waiting = call('HGETALL', UNSCORED)
in_batches(waiting, function(...) call('HSET', RETRIES, ...) end)
call('DEL', UNSCORED)
return #waiting / 2
