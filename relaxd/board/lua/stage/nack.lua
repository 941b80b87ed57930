-- Hand groups back. ARGV: stage, consumer, whether the delivery counts as failed (0 or 1), max_deliveries, then for each
-- delivery: id, entry, attempt. Returns the number of groups that were still held.
local stage, consumer, counts, max_deliveries = ARGV[1], ARGV[2], ARGV[3] == '1', tonumber(ARGV[4])
local nacked = 0
for i = 5, #ARGV, 3 do
  local id, entry_id, attempt = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2])
  if held(id, stage, entry_id, consumer, attempt) then
    hand_back(id, read_group(id), stage, attempt, counts, max_deliveries)
    nacked = nacked + 1
  end
end
return finish(nacked)
