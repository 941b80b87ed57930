-- Free what only a run that goes on needs: prompts that wait to be tried again, sizes of groups. ARGV: coordinator's epoch.
local epoch = tonumber(ARGV[1])
local current = call('HGET', STATE, 'coordinator_epoch')
if not current then return fail('RUNMISSING the run is not on the board') end
if epoch < tonumber(current) then return fail('FENCED epoch ' .. epoch .. ' is over: ' .. current .. ' coordinates') end
for _, waiting in ipairs(call('HVALS', RETRIES)) do
  for _, key in ipairs(payload_keys(string.match(waiting, '|(.*)$'))) do removed.payloads[#removed.payloads + 1] = key end
end
call('DEL', RETRIES, P .. 'sizes')
return finish(1)
