-- Hand groups back. ARGV: stage, consumer, whether the delivery counts as one that failed (0 or 1), max_deliveries, then for
-- each delivery: id, entry, attempt.
local handed_back = 0
for i = 5, #ARGV, 3 do
  local id, attempt = ARGV[i], tonumber(ARGV[i + 2])
  if held(id, ARGV[1], ARGV[i + 1], ARGV[2], attempt) then
    hand_back(id, read_group(id), ARGV[1], attempt, ARGV[3] == '1', tonumber(ARGV[4]))
    handed_back = handed_back + 1
  end
end
return finish(handed_back)
