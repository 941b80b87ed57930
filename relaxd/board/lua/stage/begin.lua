-- Record the weight version with which a group's generation starts. ARGV: id, stage, entry, consumer, attempt, version.
-- Returns 0 if the delivery does not hold the group any more.
local id, stage, entry_id, consumer, attempt, version = unpack(ARGV)
if not held(id, stage, entry_id, consumer, attempt) then return 0 end
call('HSET', STARTED, id, version)
return 1
