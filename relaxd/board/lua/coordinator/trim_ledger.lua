-- Remove the ledger's steps before one. ARGV: coordinator's term, that step. Returns how many were removed.
local refused = refuse_coordinator(tonumber(ARGV[1]))
if refused then return refused end
return call('XTRIM', P .. 'ledger', 'MINID', ARGV[2] .. '-0')
