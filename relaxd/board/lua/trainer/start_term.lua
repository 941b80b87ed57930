-- Start the next trainer term and free the groups that the last trainer held. ARGV: name of the train stage, max_deliveries.
-- Returns the new term.
local stage, max_deliveries = ARGV[1], tonumber(ARGV[2])
if call('EXISTS', STATE) == 0 then return run_missing() end
local stream = stream_key(stage)
for _, pending in ipairs(call('XPENDING', stream, WORKERS, '-', '+', 100000)) do
  local entry_id, _, _, deliveries = unpack(pending)
  local fields = to_table(call('XRANGE', stream, entry_id, entry_id)[1][2])
  local group = fields.group and read_group(fields.group)
  local before = tonumber(fields.attempts or 0)
  if not (group and before) or group['entry:' .. stage] ~= entry_id then
    discard(stage, entry_id)
  else
    hand_back(fields.group, group, stage, before + deliveries, true, max_deliveries)
  end
end
finish()
for _, reply in ipairs(call('XINFO', 'CONSUMERS', stream, WORKERS)) do
  local consumer = to_table(reply)
  if consumer.pending == 0 then call('XGROUP', 'DELCONSUMER', stream, WORKERS, consumer.name) end
end
return call('HINCRBY', STATE, 'trainer_term', 1)
