-- Publish groups, all or none: gate, data cursor, counters, entries.
-- ARGV: NODES, coordinator's term, stages (JSON), cursor (JSON, or empty to leave it), then for each group: id, pointer, trace,
-- worst-case bytes, retry_of (or empty), payload of the small columns, facts (JSON, or empty). Returns the number of groups; 0 if they were published
-- before.
local term, stages, cursor = tonumber(ARGV[4]), cjson.decode(ARGV[5]), ARGV[6]
local refused = refuse_coordinator(term)
if refused then return refused end
call('HSET', STATE, 'coordinator_term', term)

local groups, ids, pointers, worst_bytes = {}, {}, {}, 0
for i = 7, #ARGV, 7 do
  local id, pointer, trace, worst, retry_of, shared, facts = unpack(ARGV, i, i + 6)
  local group = { id = id, pointer = pointer, trace = trace, worst_bytes = tonumber(worst), retry_of = retry_of, shared = shared,
    facts = facts }
  groups[#groups + 1], ids[#ids + 1], pointers[#pointers + 1] = group, id, pointer
  worst_bytes = math.max(worst_bytes, group.worst_bytes)
end
-- Refuse to publish: what was written for it is garbage.
local function refuse(reply)
  for _, group in ipairs(groups) do give_up(group.pointer) end
  return finish(reply)
end
if table.concat(ids, ' ') == call('HGET', STATE, 'last_publish') then return refuse(0) end -- repeated: the reply was lost

local gate = admission()
local allowed, reason = gate.admit(worst_bytes)
if #ids > allowed then return refuse(fail('GATE ' .. reason)) end

local taken = next(found_in(OPEN, ids))
if taken then return refuse(fail('CONFLICT group ' .. taken .. ' is open already')) end
for _, group in ipairs(groups) do
  if group.retry_of ~= '' and call('HEXISTS', RETRIES, group.retry_of) == 0 then
    return refuse(fail('CONFLICT no retry of group ' .. group.retry_of .. ' is waiting'))
  end
end
local accepted, garbage = {}, found_in(GARBAGE, pointers)
for _, group in ipairs(groups) do
  if group.retry_of == '' then
    if not accept(group.pointer, group.shared, garbage) then
      for _, pointer in ipairs(accepted) do throw_away(pointer) end
      return refuse(fail('TOOLATE prompts'))
    end
    accepted[#accepted + 1] = group.pointer
  end
end

local now = microseconds()
local stored_bytes, reserved_bytes = 0, 0
for _, group in ipairs(groups) do
  local retries = 0
  if group.retry_of ~= '' then
    local before, pointer, facts = string.match(call('HGET', RETRIES, group.retry_of), '^(%d+)|([^|]*)|?(.*)$')
    call('HDEL', RETRIES, group.retry_of)
    retries, group.pointer, group.facts = tonumber(before) + 1, pointer, facts
  end
  local stored = bytes_of(group.pointer)
  local room = math.max(1, gate.room_for(group.worst_bytes))
  local fields = { '@publish', group.pointer, 'trace', group.trace, 'published', now, 'stored', stored, 'room', room }
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
  stored_bytes, reserved_bytes = stored_bytes + stored, reserved_bytes + room
end
in_batches(ids, function(...) call('SADD', OPEN, ...) end)
call('HSET', STATE, 'last_publish', table.concat(ids, ' '))
call('HINCRBY', STATE, 'published', #ids)
call('HINCRBY', STATE, 'stored_bytes', stored_bytes)
call('HINCRBY', STATE, 'reserved_bytes', reserved_bytes)
if cursor ~= '' then call('HSET', STATE, 'cursor', cursor) end
return #ids
