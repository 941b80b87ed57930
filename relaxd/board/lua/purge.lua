-- Free what only a run that goes on needs: prompts that wait to be tried again, sizes of groups. ARGV: coordinator's term.
local term = tonumber(ARGV[1])
local current = call('HGET', STATE, 'coordinator_term')
if not current then return fail('RUNMISSING the run is not on the board') end
if term < tonumber(current) then return fail('FENCED term ' .. term .. ' is over: ' .. current .. ' coordinates') end
for _, waiting in ipairs(call('HVALS', RETRIES)) do
  for _, key in ipairs(payload_keys(string.match(waiting, '|(.*)$'))) do removed.payloads[#removed.payloads + 1] = key end
end
call('DEL', RETRIES, P .. 'sizes')
return finish(1)
