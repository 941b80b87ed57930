-- Drop a group. ARGV: id, reason, retry (0 or 1), max_retries, then of a delivery: stage, entry, consumer, attempt (or nothing).
local group = read_group(ARGV[1])
if not group then return 0 end
if ARGV[5] and not held(ARGV[1], ARGV[5], ARGV[6], ARGV[7], ARGV[8]) then return 0 end
drop(ARGV[1], group, ARGV[2], ARGV[5] or '', ARGV[8] or 0, ARGV[3] == '1', tonumber(ARGV[4]))
return finish(1)
