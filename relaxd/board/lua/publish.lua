-- Publish groups, all or none: gate, data cursor, counters, entries.
-- ARGV: term, stages (JSON), cursor (JSON, or empty: leave it), then for each group: id, pointer, trace, worst-case bytes,
-- retry_of, the payload of its small columns.
local term = tonumber(ARGV[1])
local state = call('HMGET', STATE, 'coordinator_term', 'last_publish')
if not state[1] then return fail('RUNMISSING the run is not on the board') end
if term < tonumber(state[1]) then return fail('FENCED term ' .. term .. ' is over: ' .. state[1] .. ' coordinates') end
call('HSET', STATE, 'coordinator_term', term)

local ids, worst = {}, 0
for i = 4, #ARGV, 6 do
  ids[#ids + 1] = ARGV[i]
  worst = math.max(worst, tonumber(ARGV[i + 3]))
end
if table.concat(ids, ' ') == state[2] then return 0 end -- said again: the reply was lost

local gate = admission()
local allowed, reason = gate.admit(worst)
if #ids > allowed then return fail('GATE ' .. reason) end

for i = 1, #ids, 1000 do
  for n, open in ipairs(call('SMISMEMBER', OPEN, unpack(ids, i, math.min(i + 999, #ids)))) do
    if open == 1 then return fail('CONFLICT group ' .. ids[i + n - 1] .. ' is open already') end
  end
end
local stored = {}
for i = 4, #ARGV, 6 do
  local retry_of = ARGV[i + 4]
  if retry_of ~= '' then
    if call('HEXISTS', RETRIES, retry_of) == 0 then return fail('CONFLICT no retry of group ' .. retry_of .. ' is waiting') end
  else
    stored[i] = keep(ARGV[i + 1], ARGV[i + 5])
    if not stored[i] then return fail('EXPIRED') end
  end
end

local stages = cjson.decode(ARGV[2])
local time = call('TIME')
local now = time[1] .. string.format('%06d', time[2])
local stored_bytes, reserved_bytes = 0, 0
for i = 4, #ARGV, 6 do
  local id, pointer, retries, retry_of = ARGV[i], ARGV[i + 1], 0, ARGV[i + 4]
  if retry_of ~= '' then
    local before
    before, pointer = string.match(call('HGET', RETRIES, retry_of), '^(%d+)|(.*)$')
    retries = tonumber(before) + 1
    call('HDEL', RETRIES, retry_of)
    stored[i] = 0
    for _, key in ipairs(payload_keys(pointer)) do stored[i] = stored[i] + call('STRLEN', key) end
  end
  local group = { ['@publish'] = pointer, trace = ARGV[i + 2] }
  local room = math.max(1, gate.room_for(tonumber(ARGV[i + 3])))
  local changes = { '@publish', pointer, 'trace', ARGV[i + 2], 'published', now, 'stored', stored[i], 'room', room }
  if retries > 0 then
    changes[#changes + 1] = 'retries'
    changes[#changes + 1] = retries
  end
  offer_ready(id, group, stages, changes)
  call('HSET', group_key(id), unpack(changes))
  stored_bytes, reserved_bytes = stored_bytes + stored[i], reserved_bytes + room
end
in_batches(ids, function(...) call('SADD', OPEN, ...) end)
call('HSET', STATE, 'last_publish', table.concat(ids, ' '))
call('HINCRBY', STATE, 'published', #ids)
call('HINCRBY', STATE, 'stored_bytes', stored_bytes)
call('HINCRBY', STATE, 'reserved_bytes', reserved_bytes)
if ARGV[3] ~= '' then call('HSET', STATE, 'cursor', ARGV[3]) end
return #ids
