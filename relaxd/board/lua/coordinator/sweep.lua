-- Take the next step of a sweep. ARGV: coordinator's term, most pointers, then pointers whose payloads have been freed. Gives up
-- attempts that are overdue. Returns pointers whose payloads are to be freed.
local term, most = tonumber(ARGV[1]), tonumber(ARGV[2])
local refused = refuse_coordinator(term)
if refused then return refused end
local freed = 0
for i = 3, #ARGV do
  if call('SREM', GARBAGE, ARGV[i]) == 1 then freed = freed + bytes_of(ARGV[i]) end
end
if freed > 0 then call('HINCRBY', STATE, 'garbage_bytes', -freed) end
give_up(call('ZRANGEBYSCORE', PENDING, '-inf', milliseconds(), 'LIMIT', 0, most))
finish()
return call('SRANDMEMBER', GARBAGE, most)
