-- Make room when Redis takes no more writes: drop surplus groups, the newest first, until what they have stored comes to a
-- twentieth of what Redis may use. Their prompts wait to be tried again. Groups that the open step needs, and those that the
-- trainer has taken, stay. ARGV: coordinator's term. Answers how many were dropped.
local term = tonumber(ARGV[1])
local current = call('HGET', STATE, 'coordinator_term')
if not current then return fail('RUNMISSING the run is not on the board') end
if term < tonumber(current) then return fail('FENCED term ' .. term .. ' is over: ' .. current .. ' coordinates') end
local used, most = memory(tonumber(call('HGET', STATE, 'high_water_bytes')))
if used < most then return 0 end
local open = call('SMEMBERS', OPEN)
local surplus = #open - tonumber(call('HGET', STATE, 'groups_per_step'))
local candidates = {}
for _, id in ipairs(open) do
  local fields = call('HMGET', group_key(id), 'published', 'stored', 'entry:train')
  local taken = fields[3] and call('XPENDING', stream_key('train'), WORKERS, fields[3], fields[3], 1)[1]
  if not taken then candidates[#candidates + 1] = { id = id, published = fields[1], stored = tonumber(fields[2]) } end
end
table.sort(candidates, function(one, other) return one.published > other.published end)
local dropped, freed = 0, 0
for _, candidate in ipairs(candidates) do
  if dropped >= surplus or freed >= most * 0.05 then break end
  drop(candidate.id, read_group(candidate.id), 'memory', '', 0, true, NO_LIMIT)
  dropped, freed = dropped + 1, freed + candidate.stored
end
return finish(dropped)
