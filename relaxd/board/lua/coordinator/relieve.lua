-- Make room when Redis is full: drop surplus groups, the newest first, until that frees a twentieth of its maximum. Their
-- prompts wait to be retried. Groups that the open step needs or the trainer has taken stay.
-- ARGV: NODES, coordinator's term. Returns the number of dropped groups.
local term = tonumber(ARGV[4])
local refused = refuse_coordinator(term)
if refused then return refused end
local full, max_bytes = fullness(tonumber(call('HGET', STATE, 'high_water_bytes')))
if full == '' then return 0 end
local open = call('SMEMBERS', OPEN)
local surplus = #open - tonumber(call('HGET', STATE, 'groups_per_step'))
local candidates = {}
for _, id in ipairs(open) do
  local published, stored, entry_id = unpack(call('HMGET', group_key(id), 'published', 'stored', 'entry:train'))
  local taken = entry_id and call('XPENDING', stream_key('train'), WORKERS, entry_id, entry_id, 1)[1]
  if not taken then candidates[#candidates + 1] = { id = id, published = published, stored = tonumber(stored) } end
end
table.sort(candidates, function(left, right) return left.published > right.published end)
local dropped, freed = 0, 0
for _, candidate in ipairs(candidates) do
  if dropped >= surplus or freed >= max_bytes * 0.05 then break end
  drop(candidate.id, read_group(candidate.id), 'memory', '', 0, true, NO_LIMIT)
  dropped, freed = dropped + 1, freed + candidate.stored
end
return finish(dropped)
