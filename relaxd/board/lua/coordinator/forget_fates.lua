-- Remove fates that are in the run's folder. ARGV: coordinator's term, the first entry that stays. Returns how many were
-- removed.
local refused = refuse_coordinator(tonumber(ARGV[1]))
if refused then return refused end
return call('XTRIM', P .. 'fates', 'MINID', ARGV[2])
