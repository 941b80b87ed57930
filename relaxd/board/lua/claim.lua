-- Take over what consumers that died or stalled held. ARGV: stage, consumer, count, lease in ms, max_deliveries.
-- Answers entries: id, fields, deliveries under this entry.
if call('EXISTS', stream_key(ARGV[1])) == 0 then return fail('RUNMISSING the run is not on the board') end
local stage, consumer, lease, max_deliveries = ARGV[1], ARGV[2], ARGV[4], tonumber(ARGV[5])
local taken = {}
for _, pending in ipairs(call('XPENDING', stream_key(stage), WORKERS, 'IDLE', lease, '-', '+', ARGV[3])) do
  local entry = call('XCLAIM', stream_key(stage), WORKERS, consumer, lease, pending[1])[1]
  if entry then -- else it was deleted
    local fields = {}
    for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
    local group = fields.group and read_group(fields.group)
    local before = tonumber(fields.attempts or 0)
    if not (group and before) or group['entry:' .. stage] ~= pending[1] then
      discard(stage, pending[1])
    elseif before + pending[4] >= max_deliveries then
      drop(fields.group, group, 'poison', stage, before + pending[4], false, 0, FAILED)
    else
      call('HINCRBY', P .. 'redelivered', stage, 1)
      taken[#taken + 1] = { entry[1], entry[2], pending[4] + 1 }
    end
  end
end
return finish(taken)
