-- Remove entries that a consumer could not read. ARGV: stage, then the entries' ids.
local stage = ARGV[1]
for i = 2, #ARGV do discard(stage, ARGV[i]) end
return finish(#ARGV - 1)
