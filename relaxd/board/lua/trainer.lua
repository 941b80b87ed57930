-- A new trainer takes the place of the last one: it gets the next term, and what the last one held is free again.
-- ARGV: name of the train stage, max_deliveries.
if call('EXISTS', STATE) == 0 then return fail('RUNMISSING the run is not on the board') end
local stage = ARGV[1]
for _, pending in ipairs(call('XPENDING', stream_key(stage), WORKERS, '-', '+', 100000)) do
  local entry = call('XRANGE', stream_key(stage), pending[1], pending[1])[1]
  local fields = {}
  for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
  local group = fields.group and read_group(fields.group)
  local before = tonumber(fields.attempts or 0)
  if not (group and before) or group['entry:' .. stage] ~= pending[1] then
    discard(stage, pending[1])
  else
    hand_back(fields.group, group, stage, before + pending[4], true, tonumber(ARGV[2]))
  end
end
finish()
for _, consumer in ipairs(call('XINFO', 'CONSUMERS', stream_key(stage), WORKERS)) do
  local fields = {}
  for i = 1, #consumer, 2 do fields[consumer[i]] = consumer[i + 1] end
  if fields.pending == 0 then call('XGROUP', 'DELCONSUMER', stream_key(stage), WORKERS, fields.name) end
end
return call('HINCRBY', STATE, 'trainer_term', 1)
