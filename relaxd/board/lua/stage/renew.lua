-- Renew leases. ARGV: stage, consumer, then for each delivery: id, entry, attempt. Returns the ids that are still held.
local stage, consumer, ids, entries = ARGV[1], ARGV[2], {}, {}
for i = 3, #ARGV, 3 do
  local id, entry_id, attempt = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  if held(id, stage, entry_id, consumer, attempt) then
    ids[#ids + 1] = id
    entries[#entries + 1] = entry_id
  end
end
for i = 1, #entries, 1000 do
  local batch = { unpack(entries, i, math.min(i + 999, #entries)) }
  batch[#batch + 1] = 'JUSTID' -- which also leaves the delivery count alone
  call('XCLAIM', stream_key(stage), WORKERS, consumer, 0, unpack(batch))
end
return ids
