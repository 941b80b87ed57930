-- Drop the group that a delivery holds. ARGV: id, reason, retry (0, 1 or unscored), max_retries, counter of such drops in a row
-- (or empty), detail for people, stage, entry, consumer, attempt. Returns 0 if the delivery does not hold the group any more.
local id, reason, retry, max_retries, counter = ARGV[1], ARGV[2], ARGV[3] == '1' or ARGV[3], tonumber(ARGV[4]), ARGV[5]
local detail, stage, entry_id, consumer, attempt = ARGV[6], ARGV[7], ARGV[8], ARGV[9], ARGV[10]
local group = read_group(id)
if not group or not held(id, stage, entry_id, consumer, attempt) then return 0 end
drop(id, group, reason, stage, attempt, retry, max_retries, counter ~= '' and counter or nil, detail)
return finish(1)
