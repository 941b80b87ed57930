-- Publish groups, all or none: gate, data cursor, counters, entries.
-- ARGV: coordinator's term, stages (JSON), cursor (JSON, or empty to leave it), then for each group: id, pointer, trace,
-- worst-case bytes, retry_of (or empty), payload of the small columns, facts (JSON, or empty). Returns the number of groups; 0 if they were published
-- before.
local term, stages, cursor = tonumber(ARGV[1]), cjson.decode(ARGV[2]), ARGV[3]
local refused = refuse_coordinator(term)
if refused then return refused end
call('HSET', STATE, 'coordinator_term', term)

local groups, ids, worst_bytes = {}, {}, 0
for i = 4, #ARGV, 7 do
  local id, pointer, trace, worst, retry_of, shared, facts = unpack(ARGV, i, i + 6)
  local group = { id = id, pointer = pointer, trace = trace, worst_bytes = tonumber(worst), retry_of = retry_of, shared = shared,
    facts = facts }
  groups[#groups + 1], ids[#ids + 1] = group, id
  worst_bytes = math.max(worst_bytes, group.worst_bytes)
end
if table.concat(ids, ' ') == call('HGET', STATE, 'last_publish') then return 0 end -- repeated: the reply was lost

local gate = admission()
local allowed, reason = gate.admit(worst_bytes)
if #ids > allowed then return fail('GATE ' .. reason) end

for i = 1, #ids, 1000 do
  for offset, open in ipairs(call('SMISMEMBER', OPEN, unpack(ids, i, math.min(i + 999, #ids)))) do
    if open == 1 then return fail('CONFLICT group ' .. ids[i + offset - 1] .. ' is open already') end
  end
end
for _, group in ipairs(groups) do
  if group.retry_of ~= '' then
    if call('HEXISTS', RETRIES, group.retry_of) == 0 then
      return fail('CONFLICT no retry of group ' .. group.retry_of .. ' is waiting')
    end
  else
    group.stored = keep(group.pointer, group.shared)
    if not group.stored then return fail('EXPIRED') end
  end
end

local now = microseconds()
local stored_bytes, reserved_bytes = 0, 0
for _, group in ipairs(groups) do
  local retries = 0
  if group.retry_of ~= '' then
    local before, pointer, facts = string.match(call('HGET', RETRIES, group.retry_of), '^(%d+)|([^|]*)|?(.*)$')
    call('HDEL', RETRIES, group.retry_of)
    retries, group.pointer, group.stored, group.facts = tonumber(before) + 1, pointer, 0, facts
    for _, key in ipairs(payload_keys(pointer)) do group.stored = group.stored + call('STRLEN', key) end
  end
  local room = math.max(1, gate.room_for(group.worst_bytes))
  local fields = { '@publish', group.pointer, 'trace', group.trace, 'published', now, 'stored', group.stored, 'room', room }
  if retries > 0 then
    fields[#fields + 1] = 'retries'
    fields[#fields + 1] = retries
  end
  if group.facts ~= '' then
    fields[#fields + 1] = 'facts:publish'
    fields[#fields + 1] = group.facts
  end
  offer_ready(group.id, { ['@publish'] = group.pointer, trace = group.trace }, stages, fields)
  call('HSET', group_key(group.id), unpack(fields))
  stored_bytes, reserved_bytes = stored_bytes + group.stored, reserved_bytes + room
end
in_batches(ids, function(...) call('SADD', OPEN, ...) end)
call('HSET', STATE, 'last_publish', table.concat(ids, ' '))
call('HINCRBY', STATE, 'published', #ids)
call('HINCRBY', STATE, 'stored_bytes', stored_bytes)
call('HINCRBY', STATE, 'reserved_bytes', reserved_bytes)
if cursor ~= '' then call('HSET', STATE, 'cursor', cursor) end
return #ids
