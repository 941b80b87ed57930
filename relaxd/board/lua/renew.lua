-- Keep holds. ARGV: stage, consumer, then for each delivery: id, entry, attempt. Answers the ids that are still held.
local stage, consumer, ids, entries = ARGV[1], ARGV[2], {}, {}
for i = 3, #ARGV, 3 do
  if held(ARGV[i], stage, ARGV[i + 1], consumer, ARGV[i + 2]) then
    ids[#ids + 1] = ARGV[i]
    entries[#entries + 1] = ARGV[i + 1]
  end
end
for i = 1, #entries, 1000 do
  local batch = { unpack(entries, i, math.min(i + 999, #entries)) }
  batch[#batch + 1] = 'JUSTID' -- which also leaves the delivery count alone
  call('XCLAIM', stream_key(stage), WORKERS, consumer, 0, unpack(batch))
end
return ids
