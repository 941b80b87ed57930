-- Free the groups that a dead consumer holds, and delete the consumer. Each delivery counts as failed.
-- ARGV: coordinator's term, consumer, max_deliveries, then the stages. Returns the number of freed groups.
local term, consumer, max_deliveries = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[3])
local stages = { unpack(ARGV, 4) }
local refused = refuse_coordinator(term)
if refused then return refused end
local freed = 0
for _, stage in ipairs(stages) do
  local stream = stream_key(stage)
  for _, pending in ipairs(call('XPENDING', stream, WORKERS, '-', '+', 100000, consumer)) do
    local entry_id, _, _, deliveries = unpack(pending)
    local entry = call('XRANGE', stream, entry_id, entry_id)[1]
    if entry then
      local fields = to_table(entry[2])
      local group = read_group(fields.group)
      if group then -- else it was dropped a moment ago, in another stage
        hand_back(fields.group, group, stage, tonumber(fields.attempts or 0) + deliveries, true, max_deliveries)
        freed = freed + 1
      end
    end
  end
end
finish()
for _, stage in ipairs(stages) do
  local stream = stream_key(stage)
  if #call('XPENDING', stream, WORKERS, '-', '+', 1, consumer) == 0 then
    call('XGROUP', 'DELCONSUMER', stream, WORKERS, consumer)
  end
end
return freed
