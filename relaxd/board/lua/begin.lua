-- Generation of a group starts. ARGV: id, stage, entry, consumer, attempt, version.
if not held(ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]) then return 0 end
call('HSET', STARTED, ARGV[1], ARGV[6])
return 1
