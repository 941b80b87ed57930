-- Publish groups, all or none: gate, data cursor, counters, entries.
-- ARGV: NODES, coordinator's term, stages (JSON), cursor (JSON, or empty to leave it), groups: a JSON object of lists that have
-- for each group its id, pointer (empty for a retry), bytes of all payloads, worst-case bytes and, unless no group has any, its
-- trace (or empty), the group that it retries (or empty), and facts (JSON, or empty).
-- What the small columns share is set right after this script, in the same transaction: no script handles the bytes of hundreds
-- of prompts. Returns the number of groups; 0 if they were published before.
local PUBLISHES, KEPT_PUBLISHES = P .. 'publishes', 1024
local term, stages, cursor, groups = tonumber(ARGV[4]), cjson.decode(ARGV[5]), ARGV[6], cjson.decode(ARGV[7])
local ids, pointers = groups.ids, groups.pointers
local traces, retried, all_facts = groups.traces or {}, groups.retry_of or {}, groups.facts or {}

-- Refuse to publish: what was written for it is garbage, and what is about to be set shall not stay, unless it is there already.
local function refuse(reply)
  if call('EXISTS', STATE) == 1 then give_up(pointers) end
  for _, pointer in ipairs(pointers) do
    local key = pointer ~= '' and shared_key(pointer)
    if key and call('EXISTS', key) == 0 then call('RPUSH', P .. 'unwanted', key) end
  end
  return finish(reply)
end

local refused = refuse_coordinator(term)
if refused then return refuse(refused) end
call('HSET', STATE, 'coordinator_term', term)
local id_list = table.concat(ids, ' ')
if id_list == call('HGET', STATE, 'last_publish') then return refuse(0) end -- repeated: the reply was lost
-- Names are new, so that one of them tells a request that arrives a second time, after others.
local first
for i = 1, #pointers do
  if pointers[i] ~= '' then
    first = pointers[i]
    break
  end
end
if first and call('ZSCORE', PUBLISHES, first) then return refuse(0) end

local gate = admission()
local worst_bytes = 0
for _, bytes in ipairs(groups.worst_bytes) do worst_bytes = math.max(worst_bytes, bytes) end
local allowed, reason = gate.admit(worst_bytes)
if #ids > allowed then return refuse(fail('GATE ' .. reason)) end

local taken = next(found_in(OPEN, ids))
if taken then return refuse(fail('CONFLICT group ' .. taken .. ' is open already')) end
local waiting = {} -- of those that retry others: retries, pointer, facts
for i, retry_of in ipairs(retried) do
  if retry_of ~= '' then
    waiting[i] = { string.match(call('HGET', RETRIES, retry_of) or '', '^(%d+)|([^|]*)|?(.*)$') }
    if not waiting[i][1] then return refuse(fail('CONFLICT no retry of group ' .. retry_of .. ' is waiting')) end
  end
end
local garbage = found_in(GARBAGE, pointers)
for i, pointer in ipairs(pointers) do
  if pointer ~= '' and not accept(pointer, garbage) then
    for j = 1, i - 1 do
      if string.find(pointers[j], ',', 1, true) then throw_away(pointers[j]) end -- its slices last by now
    end
    return refuse(fail('TOOLATE prompts'))
  end
end

local ready = {} -- stages that need nothing but prompts
for _, stage in ipairs(stages) do
  local name, writers = stage[1], stage[2]
  if #writers == 1 and writers[1] == 'publish' then ready[#ready + 1] = { 'entry:' .. name, stream_key(name) } end
end
local stored_bytes, reserved_bytes = 0, 0
-- One table for all groups: making one for each takes longer than filling it.
local fields, count = { '@publish', '', 'published', microseconds(), 'stored', 0, 'room', 0 }, 0
local function add_field(name, value)
  fields[count + 1], fields[count + 2] = name, value
  count = count + 2
end
for i, id in ipairs(ids) do
  local pointer, bytes, trace, facts = pointers[i], groups.bytes[i], traces[i] or '', all_facts[i] or ''
  count = 8
  if waiting[i] then
    local retries
    retries, pointer, facts = unpack(waiting[i])
    call('HDEL', RETRIES, retried[i])
    bytes = bytes_of(pointer)
    add_field('retries', retries + 1)
  end
  local room = gate.room_for(groups.worst_bytes[i])
  if not waiting[i] then room = math.max(1, room - bytes) end -- a retry's worst case may be that of a smaller prompt
  stored_bytes, reserved_bytes = stored_bytes + bytes, reserved_bytes + room
  fields[2], fields[6], fields[8] = pointer, bytes, room
  if trace ~= '' then add_field('trace', trace) end
  if facts ~= '' then add_field('facts:publish', facts) end
  for _, stage in ipairs(ready) do
    if trace == '' then
      add_field(stage[1], call('XADD', stage[2], '*', 'group', id, '@publish', pointer))
    else
      add_field(stage[1], call('XADD', stage[2], '*', 'group', id, 'trace', trace, '@publish', pointer))
    end
  end
  call('HSET', group_key(id), unpack(fields, 1, count))
end
in_batches(ids, function(...) call('SADD', OPEN, ...) end)
call('HSET', STATE, 'last_publish', id_list)
local published = call('HINCRBY', STATE, 'published', #ids)
if first then
  call('ZADD', PUBLISHES, published, first)
  call('ZREMRANGEBYRANK', PUBLISHES, 0, -KEPT_PUBLISHES - 1)
end
call('HINCRBY', STATE, 'stored_bytes', stored_bytes)
call('HINCRBY', STATE, 'reserved_bytes', reserved_bytes)
if cursor ~= '' then call('HSET', STATE, 'cursor', cursor) end
return finish(#ids)
