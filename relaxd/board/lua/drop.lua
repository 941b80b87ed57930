-- Drop a group. ARGV: id, reason, retry (0 or 1), max_retries, counter of such drops in a row (or empty), then of a delivery:
-- stage, entry, consumer, attempt (or nothing).
local group = read_group(ARGV[1])
if not group then return 0 end
if ARGV[6] and not held(ARGV[1], ARGV[6], ARGV[7], ARGV[8], ARGV[9]) then return 0 end
local counter = ARGV[5] ~= '' and ARGV[5] or nil
drop(ARGV[1], group, ARGV[2], ARGV[6] or '', ARGV[9] or 0, ARGV[3] == '1', tonumber(ARGV[4]), counter)
return finish(1)
