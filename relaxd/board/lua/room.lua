-- How many groups the gate would let in. ARGV: worst-case bytes of a group. Answers that number, and what holds back the next
-- one: a word, then numbers.
if call('EXISTS', STATE) == 0 then return fail('RUNMISSING the run is not on the board') end
local allowed, reason = admission().admit(tonumber(ARGV[1]))
return { allowed, reason }
