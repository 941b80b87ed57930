-- Remove entries that a consumer could not read. ARGV: stage, then the entries.
for i = 2, #ARGV do discard(ARGV[1], ARGV[i]) end
return finish(#ARGV - 1)
