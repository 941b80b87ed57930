-- Make the run, or find it as it is. ARGV: term, settings that must not change, stage names (JSON), then field, value ...
-- of the gate.
local term = tonumber(ARGV[1])
local found = call('HMGET', STATE, 'coordinator_term', 'settings')
if found[1] and term < tonumber(found[1]) then return fail('FENCED term ' .. term .. ' is over: ' .. found[1] .. ' coordinates') end
if found[2] and found[2] ~= ARGV[2] then return fail('RUNEXISTS with other settings: ' .. found[2]) end
if not found[2] then
  call('HSET', STATE, 'published', 0, 'trained', 0, 'dropped', 0, FAILED, 0, FILTERED, 0, 'stored_bytes', 0,
    'reserved_bytes', 0, 'last_step', 0, 'trainer_term', 0, 'gate_open', 0, 'oldest_version', '', 'cursor', 'null', 'last_publish', '', 'settings', ARGV[2])
end
call('HSET', STATE, 'coordinator_term', term, unpack(ARGV, 4))
for _, stage in ipairs(cjson.decode(ARGV[3])) do
  if call('EXISTS', stream_key(stage)) == 0 then call('XGROUP', 'CREATE', stream_key(stage), WORKERS, '0', 'MKSTREAM') end
end
return 1
