-- Take over groups whose consumers died or stalled. ARGV: stage, consumer, count, lease in ms, max_deliveries, interval in ms.
-- However many consumers ask, all holds of a stage are looked through at most once in an interval, unless more was found than
-- one of them takes. Returns entries: id, fields, deliveries under this entry.
local stage, consumer, count, lease, max_deliveries = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], tonumber(ARGV[5])
local interval = tonumber(ARGV[6])
local stream = stream_key(stage)
if call('EXISTS', stream) == 0 then return run_missing() end
local now, due = milliseconds(), tonumber(call('HGET', CLAIMS, stage) or 0)
if now < due and due - now <= interval then return {} end -- else it was set before the clock went back
local expired = call('XPENDING', stream, WORKERS, 'IDLE', lease, '-', '+', count)
if #expired < count then call('HSET', CLAIMS, stage, now + interval) end
local taken = {}
for _, pending in ipairs(expired) do
  local entry_id, _, _, deliveries = unpack(pending)
  local entry = call('XCLAIM', stream, WORKERS, consumer, lease, entry_id)[1]
  if entry then -- else it was deleted
    local fields = to_table(entry[2])
    local group = fields.group and read_group(fields.group)
    local before = tonumber(fields.attempts or 0)
    if not (group and before) or group['entry:' .. stage] ~= entry_id then
      discard(stage, entry_id)
    elseif too_often(group, stage, before + deliveries, max_deliveries) then
      drop(fields.group, group, 'poison', stage, before + deliveries, false, 0, FAILED)
    else
      call('HINCRBY', P .. 'redelivered', stage, 1)
      taken[#taken + 1] = { entry_id, entry[2], deliveries + 1 }
    end
  end
end
return finish(taken)
