-- Number the next start of ranks on several hosts. ARGV: the trainer's process, its last attempt (0: none). Returns the number.
local process, last = ARGV[1], tonumber(ARGV[2])
if call('EXISTS', STATE) == 0 then return run_missing() end
local by, newest = unpack(call('HMGET', STATE, 'attempt_by', 'attempt'))
if last > 0 and by and by ~= process then
  return fail('FENCED trainer attempt ' .. last .. ' is over: another trainer has begun ' .. newest)
end
local attempt = math.max(last, tonumber(newest or 0)) + 1
call('HSET', STATE, 'attempt_by', process, 'attempt', attempt)
return attempt
