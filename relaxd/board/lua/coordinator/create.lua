-- Create the run, or find it as it is. ARGV: coordinator's term, settings that must not change, stage names (JSON), URLs
-- of data nodes (JSON, or empty), then field, value ... of the gate.
local term, settings, stage_names, data_urls = tonumber(ARGV[1]), ARGV[2], ARGV[3], ARGV[4]
local current_term, current_settings = unpack(call('HMGET', STATE, 'coordinator_term', 'settings'))
if current_term and term < tonumber(current_term) then
  return fail('FENCED term ' .. term .. ' is over: ' .. current_term .. ' coordinates')
end
if current_settings and current_settings ~= settings then return fail('RUNEXISTS with other settings: ' .. current_settings) end
if current_settings and (call('GET', P .. 'data_nodes') or '') ~= data_urls then
  return fail('RUNEXISTS with other data nodes (board.data_urls): ' .. (call('GET', P .. 'data_nodes') or 'none'))
end
if not current_settings then
  if data_urls ~= '' then call('SET', P .. 'data_nodes', data_urls) end
  call('HSET', STATE, 'published', 0, 'trained', 0, 'dropped', 0, FAILED, 0, FILTERED, 0, 'stored_bytes', 0,
    'reserved_bytes', 0, 'garbage_bytes', 0, 'last_step', 0, 'trainer_term', 0, 'critic_term', 0, 'gate_open', 0,
    'oldest_version', '', 'cursor', 'null', 'last_publish', '', 'settings', settings)
end
call('HSET', STATE, 'coordinator_term', term, unpack(ARGV, 5))
for _, stage in ipairs(cjson.decode(stage_names)) do
  if call('EXISTS', stream_key(stage)) == 0 then call('XGROUP', 'CREATE', stream_key(stage), WORKERS, '0', 'MKSTREAM') end
end
return 1
