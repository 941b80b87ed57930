-- What every script starts with. KEYS[1] is the prefix of the run's keys, "relaxd:<run>:".
--
--   state            hash: counters, terms, gate, data cursor, bytes that open groups take and may yet take
--   open             set: ids of the groups that are neither trained nor dropped
--   started          hash: group id -> oldest weight version in it, once its generation has started
--   group:<id>       hash of an open group:
--                      trace, retries (where there were any)
--                      stored             bytes of its payloads
--                      room               bytes that it may take in all; 0 once a stage has committed
--                      published, time:<stage>  when; "<enqueued_at> <started_at> <ended>" of a stage (microseconds of Unix time)
--                      @<writer>          pointer to the columns that a stage (or "publish") wrote
--                      entry:<stage>      its entry in the stage's stream; set once it was offered
--                      attempts:<stage>   deliveries under earlier entries
--   stage:<name>     stream, consumer group "workers": group, trace, attempts (where there were any), @<writer> ...
--   columns:<attempt>[:<column>]  payloads; a pointer is "<attempt>[,<large column>...]"
--   ledger           stream, id "<step>-0"      samples   stream, id "<step>-<i>"
--   drops            hash: reason -> count      dropped   stream: what is kept of dropped groups
--   retries          hash: group id -> "<retries>|<pointer>" of prompts that wait for another try
--   sizes            list: bytes that the groups closed last took, newest first
--   redelivered      hash: stage -> deliveries that began anew what a holder had not finished
local P = KEYS[1]
local STATE, OPEN, STARTED, RETRIES = P .. 'state', P .. 'open', P .. 'started', P .. 'retries'
local WORKERS = 'workers'
local FAILED, FILTERED = 'consecutive_drops', 'consecutive_filtered' -- counters of drops in a row
local KEPT_GROUPS, KEPT_BYTES = 256, 65536
local KEPT_SIZES = 512
local NO_LIMIT = 2 ^ 31
local call, byte, unpack = redis.call, string.byte, unpack
local AT = byte('@') -- what a pointer's field starts with

local function group_key(id) return P .. 'group:' .. id end
local function stream_key(stage) return P .. 'stage:' .. stage end

local function fail(message) return redis.error_reply(message) end

-- The group as a table; nil when it is closed (or was never published).
local function read_group(id)
  local flat = call('HGETALL', group_key(id))
  if #flat == 0 then return nil end
  local group = {}
  for i = 1, #flat, 2 do group[flat[i]] = flat[i + 1] end
  return group
end

-- Keys of the payloads that a pointer names.
local function payload_keys(pointer)
  local comma = string.find(pointer, ',', 1, true)
  if not comma then return { P .. 'columns:' .. pointer } end
  local shared = P .. 'columns:' .. string.sub(pointer, 1, comma - 1)
  local keys = { shared }
  for column in string.gmatch(string.sub(pointer, comma + 1), '[^,]+') do keys[#keys + 1] = shared .. ':' .. column end
  return keys
end

-- Keep an attempt's payloads: store the shared one; the large ones expire by themselves until a script says this. Answers
-- the bytes of all; nil: they are gone already.
local function keep(pointer, shared)
  local keys, bytes = payload_keys(pointer), #shared
  for i = 2, #keys do
    if call('PERSIST', keys[i]) == 0 and call('EXISTS', keys[i]) == 0 then return nil end
    bytes = bytes + call('STRLEN', keys[i])
  end
  call('SET', keys[1], shared)
  return bytes
end

-- Account for bytes that a group has stored. The first stage that commits writes nearly all that a group will ever take:
-- from then on the group's own bytes count, and the room that was reserved for it is free.
local function account(id, group, bytes)
  call('HINCRBY', STATE, 'stored_bytes', bytes)
  call('HINCRBY', group_key(id), 'stored', bytes)
  local room = tonumber(group.room)
  if room > 0 then
    call('HINCRBY', STATE, 'reserved_bytes', -room)
    call('HSET', group_key(id), 'room', 0)
    group.room = '0'
  end
end

-- Put the group into a stage's stream.
local function offer(id, group, stage, attempts)
  local entry = { 'group', id, 'trace', group.trace }
  if attempts > 0 then
    entry[5], entry[6] = 'attempts', attempts
  end
  for name, value in pairs(group) do
    if byte(name) == AT then
      entry[#entry + 1] = name
      entry[#entry + 1] = value
    end
  end
  local entry_id = call('XADD', stream_key(stage), '*', unpack(entry))
  group['entry:' .. stage] = entry_id
  return entry_id
end

-- Offer the group to every stage whose needs are met and which has not been offered it yet, and add what changed to `changes`.
-- `stages` is a list of { name, { the writers it needs } }.
local function offer_ready(id, group, stages, changes)
  for _, stage in ipairs(stages) do
    local name = stage[1]
    if not group['entry:' .. name] then
      local ready = true
      for _, writer in ipairs(stage[2]) do ready = ready and group['@' .. writer] ~= nil end
      if ready then
        changes[#changes + 1] = 'entry:' .. name
        changes[#changes + 1] = offer(id, group, name, 0)
      end
    end
  end
end

-- What a script removes, it removes at its end, many at once: see finish().
local removed = { entries = {}, payloads = {}, groups = {} }

local function remove_entry(stage, entry_id)
  local entries = removed.entries[stage] or {}
  entries[#entries + 1] = entry_id
  removed.entries[stage] = entries
end

local function in_batches(items, apply)
  for i = 1, #items, 1000 do apply(unpack(items, i, math.min(i + 999, #items))) end
end

-- Every script that removes anything returns through this.
local function finish(reply)
  for stage, entries in pairs(removed.entries) do
    local key = stream_key(stage)
    in_batches(entries, function(...) call('XACK', key, WORKERS, ...) end)
    in_batches(entries, function(...) call('XDEL', key, ...) end)
  end
  in_batches(removed.payloads, function(...) call('UNLINK', ...) end)
  in_batches(removed.groups, function(...) call('SREM', OPEN, ...) end)
  in_batches(removed.groups, function(...) call('HDEL', STARTED, ...) end)
  return reply
end

-- Remove every trace of an open group but the counters. `spare`: a pointer whose payloads stay.
local function close(id, group, spare)
  for name, value in pairs(group) do
    if byte(name) == AT then
      if value ~= spare then
        for _, key in ipairs(payload_keys(value)) do removed.payloads[#removed.payloads + 1] = key end
      end
    elseif string.sub(name, 1, 6) == 'entry:' then
      local stage = string.sub(name, 7)
      if not group['@' .. stage] then remove_entry(stage, value) end
    end
  end
  call('DEL', group_key(id))
  removed.groups[#removed.groups + 1] = id
  call('HINCRBY', STATE, 'stored_bytes', -tonumber(group.stored))
  if tonumber(group.room) > 0 then
    call('HINCRBY', STATE, 'reserved_bytes', -tonumber(group.room))
  else
    call('LPUSH', P .. 'sizes', group.stored)
    call('LTRIM', P .. 'sizes', 0, KEPT_SIZES - 1)
  end
end

-- Close a group as dropped. With `retry`, its prompt waits to be published again, at most max_retries times. `counter`:
-- the field of the state that counts such drops in a row, where they count at all.
local function drop(id, group, reason, stage, attempt, retry, max_retries, counter)
  local pointer = group['@publish']
  local retries = tonumber(group.retries or 0)
  retry = retry and pointer and retries < max_retries
  if retry then call('HSET', RETRIES, id, retries .. '|' .. pointer) end
  local prompt = pointer and payload_keys(pointer)[1]
  local kept = ''
  if prompt and call('STRLEN', prompt) <= KEPT_BYTES then kept = call('GET', prompt) or '' end
  local time = call('TIME')
  call('XADD', P .. 'dropped', 'MAXLEN', '~', KEPT_GROUPS, '*', 'group', id, 'reason', reason, 'stage', stage,
    'attempt', attempt, 'time', time[1] .. '.' .. string.format('%06d', time[2]), 'retried', retry and 1 or 0, 'columns', kept)
  close(id, group, retry and pointer or nil)
  call('HINCRBY', STATE, 'dropped', 1)
  if counter then call('HINCRBY', STATE, counter, 1) end
  call('HINCRBY', P .. 'drops', reason, 1)
end

-- Remove an entry that can't be read, whatever became of it. The group that it is the place of, if one is, can't go on.
local function discard(stage, entry_id)
  remove_entry(stage, entry_id)
  for _, id in ipairs(call('SMEMBERS', OPEN)) do
    if call('HGET', group_key(id), 'entry:' .. stage) == entry_id then
      drop(id, read_group(id), 'damaged', stage, 0, false, 0, FAILED)
    end
  end
end

-- Whether this very delivery still holds the group: same entry, same consumer, not delivered again since.
local function held(id, stage, entry_id, consumer, attempt)
  local entry = call('HMGET', group_key(id), 'entry:' .. stage, 'attempts:' .. stage)
  if entry[1] ~= entry_id then return false end
  local pending = call('XPENDING', stream_key(stage), WORKERS, entry_id, entry_id, 1)[1]
  return pending ~= nil and pending[2] == consumer and pending[4] + tonumber(entry[2] or 0) == tonumber(attempt)
end

-- Give the group back: a new entry at the end of the stage's queue, or the end of a group that was delivered too often.
local function hand_back(id, group, stage, attempt, counts, max_deliveries)
  if counts and attempt >= max_deliveries then
    drop(id, group, 'poison', stage, attempt, false, 0, FAILED)
    return
  end
  if counts then call('HINCRBY', P .. 'redelivered', stage, 1) end
  remove_entry(stage, group['entry:' .. stage])
  local before = counts and attempt or attempt - 1
  local entry_id = offer(id, group, stage, before)
  call('HSET', group_key(id), 'entry:' .. stage, entry_id, 'attempts:' .. stage, before)
end

