-- Publish groups, all or none: gate, data cursor, counters, entries.
-- ARGV: NODES, coordinator's term, stages (JSON), cursor (JSON, or empty to leave it), then for each group: id, pointer, trace,
-- worst-case bytes, retry_of (or empty), payload of the small columns, facts (JSON, or empty). Returns the number of groups; 0 if they were published
-- before.
local term, stages, cursor = tonumber(ARGV[4]), cjson.decode(ARGV[5]), ARGV[6]
local FIRST, WIDTH = 7, 7
local refused = refuse_coordinator(term)
if refused then return refused end
call('HSET', STATE, 'coordinator_term', term)

local ids, pointers, worst_bytes = {}, {}, 0
for i = FIRST, #ARGV, WIDTH do
  ids[#ids + 1], pointers[#pointers + 1] = ARGV[i], ARGV[i + 1]
  worst_bytes = math.max(worst_bytes, ARGV[i + 3])
end
-- Refuse to publish: what was written for it is garbage.
local function refuse(reply)
  give_up(pointers)
  return finish(reply)
end
if table.concat(ids, ' ') == call('HGET', STATE, 'last_publish') then return refuse(0) end -- repeated: the reply was lost

local gate = admission()
local allowed, reason = gate.admit(worst_bytes)
if #ids > allowed then return refuse(fail('GATE ' .. reason)) end

local taken = next(found_in(OPEN, ids))
if taken then return refuse(fail('CONFLICT group ' .. taken .. ' is open already')) end
for i = FIRST, #ARGV, WIDTH do
  local retry_of = ARGV[i + 4]
  if retry_of ~= '' and call('HEXISTS', RETRIES, retry_of) == 0 then
    return refuse(fail('CONFLICT no retry of group ' .. retry_of .. ' is waiting'))
  end
end
local sizes, garbage = {}, found_in(GARBAGE, pointers)
for i = FIRST, #ARGV, WIDTH do
  if ARGV[i + 4] == '' then
    sizes[i] = accept(ARGV[i + 1], ARGV[i + 5], garbage)
    if not sizes[i] then
      for j in pairs(sizes) do throw_away(ARGV[j + 1]) end
      return refuse(fail('TOOLATE prompts'))
    end
  end
end

local ready = {} -- stages that need nothing but prompts
for _, stage in ipairs(stages) do
  local name, writers = stage[1], stage[2]
  if #writers == 1 and writers[1] == 'publish' then ready[#ready + 1] = { 'entry:' .. name, stream_key(name) } end
end
local now = microseconds()
local stored_bytes, reserved_bytes = 0, 0
-- One table for all groups: making one for each takes longer than filling it.
local fields = { '@publish', '', 'trace', '', 'published', now, 'stored', 0, 'room', 0 }
for i = FIRST, #ARGV, WIDTH do
  local id, pointer, trace, worst, retry_of, _, facts = unpack(ARGV, i, i + WIDTH - 1)
  local count, retries = 10, nil
  if retry_of ~= '' then
    retries, pointer, facts = string.match(call('HGET', RETRIES, retry_of), '^(%d+)|([^|]*)|?(.*)$')
    call('HDEL', RETRIES, retry_of)
    fields[count + 1], fields[count + 2] = 'retries', retries + 1
    count = count + 2
  end
  local stored, room = sizes[i] or bytes_of(pointer), math.max(1, gate.room_for(tonumber(worst)))
  stored_bytes, reserved_bytes = stored_bytes + stored, reserved_bytes + room
  fields[2], fields[4], fields[8], fields[10] = pointer, trace, stored, room
  if facts ~= '' then
    fields[count + 1], fields[count + 2] = 'facts:publish', facts
    count = count + 2
  end
  for _, stage in ipairs(ready) do
    fields[count + 1] = stage[1]
    fields[count + 2] = call('XADD', stage[2], '*', 'group', id, 'trace', trace, '@publish', pointer)
    count = count + 2
  end
  call('HSET', group_key(id), unpack(fields, 1, count))
end
in_batches(ids, function(...) call('SADD', OPEN, ...) end)
call('HSET', STATE, 'last_publish', table.concat(ids, ' '))
call('HINCRBY', STATE, 'published', #ids)
call('HINCRBY', STATE, 'stored_bytes', stored_bytes)
call('HINCRBY', STATE, 'reserved_bytes', reserved_bytes)
if cursor ~= '' then call('HSET', STATE, 'cursor', cursor) end
return finish(#ids)
