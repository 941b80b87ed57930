-- Remove the digests of versions that are in the run's folder. ARGV: coordinator's term, the first version that stays.
-- Returns how many versions were removed.
local refused = refuse_coordinator(tonumber(ARGV[1]))
if refused then return refused end
local first, old = tonumber(ARGV[2]), {}
for _, version in ipairs(call('HKEYS', P .. 'weights')) do
  if tonumber(version) < first then old[#old + 1] = version end
end
in_batches(old, function(...) call('HDEL', P .. 'weights', ...) end)
return #old
