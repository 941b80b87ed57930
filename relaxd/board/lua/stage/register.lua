-- Register attempts whose large columns are about to be written. ARGV: milliseconds until they are overdue, then for each: group,
-- stage (or "publish", or "samples": of a step, under its number), pointer. Returns the pointers of those that come too late: the group is closed or has the stage's columns
-- already, or the attempt was given up.
if call('EXISTS', STATE) == 0 then return run_missing() end
local overdue = milliseconds() + ARGV[1]
local refused = {}
for i = 2, #ARGV, 3 do
  local id, stage, pointer = unpack(ARGV, i, i + 2)
  local entry, committed = unpack(call('HMGET', group_key(id), 'entry:' .. stage, '@' .. stage))
  local wanted = stage == 'publish' or stage == 'samples' or (entry and not committed)
  if wanted and call('SISMEMBER', GARBAGE, pointer) == 0 then
    call('ZADD', PENDING, overdue, pointer)
  else
    refused[#refused + 1] = pointer
  end
end
return refused
