-- The start of every script. KEYS[1] is the prefix of the run's keys, "relaxd:{<run>}:".
--
--   state            hash: counters, terms, gate, data cursor, bytes stored by and reserved for open groups, bytes of garbage,
--                    number and bytes of the samples to show
--   open             set: ids of the groups that are neither trained nor dropped
--   started          hash: group id -> oldest weight version in it, once its generation has started
--   group:<id>       hash of an open group:
--                      trace, retries (where there are any)
--                      stored             bytes of its payloads
--                      facts:<writer>     what its fate is told with (JSON; relaxd.board.group_contents)
--                      room               bytes reserved for what it will store; 0 once a stage has committed
--                      published          when it was published (microseconds of Unix time)
--                      time:<stage>       "<enqueued_at> <started_at> <ended>" of a stage (the same unit)
--                      @<writer>          pointer to the columns that a stage (or "publish") wrote
--                      entry:<stage>      its entry in the stage's stream, once it was offered
--                      attempts:<stage>   deliveries under earlier entries
--                      saved:<stage>      pointers to the parts of a stage's unfinished work, separated by spaces
--                      forgiven:<stage>   deliveries that saved much, which don't count towards max_deliveries;
--                                         forgiven_attempt:<stage> is the last of them
--   stage:<name>     stream, consumer group "workers": group, trace and attempts (where there are any), @<writer> ...
--   columns:<name>:<bytes>[:<column>:<slice>]  payloads of an attempt; its pointer is
--                    "<name>:<bytes>[,<column>:<bytes>:<slices>[@<data node>]]..." (relaxd.board.attempts). Slices
--                    expire until the attempt is accepted; those on a data node until just before.
--   data_nodes       URLs of the run's data nodes (JSON), where there are any
--   pending          sorted set: pointers of attempts whose slices are being written -> when they are given up (milliseconds)
--   garbage          set: pointers that no group has any more, or that came too late; sweep frees what they name
--   unwanted         list: keys of payloads that the transaction under way sets, but shall not leave (relaxd.board.scripts)
--   publishes        sorted set: a pointer of each of the last publishes -> groups published by then; one that comes again
--                    does nothing
--   ledger           stream, id "<step>-0": the newest steps (LEDGER_STEPS); all are in the run's folder
--   samples          stream, id "<step>-0": count and pointer of the newest steps' samples to show; column <i> is one of them
--   weights          hash: version -> digests of the weights that the trainer has sent as this version, separated by spaces;
--                    only versions that a step may still train on, and those that the run's folder lacks
--   drops            hash: reason -> count      dropped   stream: records of dropped groups
--   fates            stream: what became of each closed group, until the coordinator has written it to the run's folder
--   retries          hash: group id -> "<retries>|<pointer>|<facts>" of prompts that wait to be retried
--   unscored         hash: the same, of prompts whose reward failed; retry_unscored moves them to retries
--   sizes            list: bytes of the groups closed last, newest first
--   redelivered      hash: stage -> deliveries that repeated an unfinished one
--   claims           hash: stage -> when its holds are next looked through for expired ones (milliseconds)
local P = KEYS[1]
local STATE, OPEN, STARTED, RETRIES = P .. 'state', P .. 'open', P .. 'started', P .. 'retries'
local UNSCORED, PENDING, GARBAGE, CLAIMS = P .. 'unscored', P .. 'pending', P .. 'garbage', P .. 'claims'
local WORKERS = 'workers'
local FAILED, FILTERED = 'consecutive_drops', 'consecutive_filtered' -- fields of the state: drops in a row
local KEPT_GROUPS, KEPT_BYTES = 256, 65536
local KEPT_SIZES = 512
local KEPT_UNSCORED = 1024
local NO_LIMIT = 2 ^ 31
local call, byte, unpack = redis.call, string.byte, unpack
local AT = byte('@') -- the first byte of a pointer's field

local function group_key(id) return P .. 'group:' .. id end
local function stream_key(stage) return P .. 'stage:' .. stage end

local function fail(message) return redis.error_reply(message) end
local function run_missing() return fail('RUNMISSING the run is not on the board') end

-- Return the error for a caller that is not the current coordinator; nil if it is.
local function refuse_coordinator(term)
  local current = call('HGET', STATE, 'coordinator_term')
  if not current then return run_missing() end
  if term < tonumber(current) then return fail('FENCED term ' .. term .. ' is over: ' .. current .. ' coordinates') end
  return nil
end

-- Return the error for a caller that is not the current trainer; nil if it is.
local function refuse_trainer(term)
  local current = call('HGET', STATE, 'trainer_term')
  if not current then return run_missing() end
  if term ~= tonumber(current) then
    return fail('FENCED trainer term ' .. term .. ' is over: ' .. current .. ' trains')
  end
  return nil
end

-- Return Redis's clock: Unix time in whole microseconds or in seconds with six digits after the point, as text, or in whole
-- milliseconds, as a number.
local function microseconds()
  local time = call('TIME')
  return time[1] .. string.format('%06d', time[2])
end
local function seconds()
  local time = call('TIME')
  return time[1] .. '.' .. string.format('%06d', time[2])
end

local function milliseconds()
  local time = call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Turn a flat list of names and values, as Redis replies, into a table.
local function to_table(flat)
  local fields = {}
  for i = 1, #flat, 2 do fields[flat[i]] = flat[i + 1] end
  return fields
end

-- Read a group as a table; nil if it is closed (or was never published).
local function read_group(id)
  local flat = call('HGETALL', group_key(id))
  return #flat > 0 and to_table(flat) or nil
end

-- Return the key of the payload that an attempt's small columns share.
local function shared_key(pointer)
  local comma = string.find(pointer, ',', 1, true)
  return P .. 'columns:' .. (comma and string.sub(pointer, 1, comma - 1) or pointer)
end

-- List the keys of the slices that a pointer names, without those on data nodes.
local function slice_keys(pointer)
  local keys, shared = {}, shared_key(pointer)
  for column, slices, node in string.gmatch(pointer, ',([^,:]+):%d+:(%d+)(@?)') do
    if node == '' then
      for i = 0, tonumber(slices) - 1 do keys[#keys + 1] = shared .. ':' .. column .. ':' .. i end
    end
  end
  return keys
end

-- Return the bytes of all payloads that a pointer names.
local function bytes_of(pointer)
  local bytes = tonumber(string.match(pointer, '^[^,]*:(%d+)') or 0)
  for large in string.gmatch(pointer, ',[^,:]+:(%d+):%d+') do bytes = bytes + tonumber(large) end
  return bytes
end

-- Collected here; finish() stores and removes it in batches.
local stored, removed = {}, { entries = {}, pointers = {}, groups = {} }

-- Leave the payloads of a pointer to the sweep.
local function throw_away(pointer) removed.pointers[#removed.pointers + 1] = pointer end

-- Give up attempts whose slices are overdue, or were written in vain. One that was accepted, and so has its shared payload,
-- isn't given up: its registration came a second time.
local function give_up(pointers)
  for _, pointer in ipairs(pointers) do
    local vain = call('ZREM', PENDING, pointer) == 1 and call('EXISTS', shared_key(pointer)) == 0
    if vain and call('SISMEMBER', GARBAGE, pointer) == 0 then throw_away(pointer) end
  end
end

-- Return those members that a set has: member -> true.
local function found_in(set, members)
  local found = {}
  if call('EXISTS', set) == 0 then return found end
  for i = 1, #members, 1000 do
    for offset, is_in in ipairs(call('SMISMEMBER', set, unpack(members, i, math.min(i + 999, #members)))) do
      if is_in == 1 then found[members[i + offset - 1]] = true end
    end
  end
  return found
end

-- Make an attempt's slices last (those on data nodes last already). Returns false if the attempt came too late. `garbage` has
-- the pointers among the caller's that are garbage: those of a request that arrived late, for a second time.
local function accept(pointer, garbage)
  if garbage[pointer] then return false end
  if string.find(pointer, ',', 1, true) then
    if call('ZREM', PENDING, pointer) == 0 then return false end
    for _, key in ipairs(slice_keys(pointer)) do
      if call('PERSIST', key) == 0 then
        throw_away(pointer)
        return false
      end
    end
  end
  return true
end

-- Let finish() store the payload of an accepted attempt's small columns. Returns the bytes of all its payloads.
local function store(pointer, shared)
  stored[#stored + 1] = shared_key(pointer)
  stored[#stored + 1] = shared
  return string.find(pointer, ',', 1, true) and bytes_of(pointer) or #shared
end

-- Add to the bytes that a group has stored.
local function add_stored(id, bytes)
  call('HINCRBY', STATE, 'stored_bytes', bytes)
  call('HINCRBY', group_key(id), 'stored', bytes)
end

-- Add the group to a stage's stream. Returns the entry's id.
local function offer(id, group, stage, attempts)
  local entry = { 'group', id }
  if group.trace then
    entry[3], entry[4] = 'trace', group.trace
  end
  if attempts > 0 then
    entry[#entry + 1] = 'attempts'
    entry[#entry + 1] = attempts
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

-- Offer the group to every stage whose columns are all written and that was not offered it before; append the changed fields
-- to `changes`. `stages` is a list of { name, { writers of the columns it needs } }.
local function offer_ready(id, group, stages, changes)
  for _, stage in ipairs(stages) do
    local name, writers = stage[1], stage[2]
    if not group['entry:' .. name] then
      local ready = true
      for _, writer in ipairs(writers) do ready = ready and group['@' .. writer] ~= nil end
      if ready then
        changes[#changes + 1] = 'entry:' .. name
        changes[#changes + 1] = offer(id, group, name, 0)
      end
    end
  end
end

-- Throw away the saved parts of a stage's unfinished work. Returns their bytes, which the caller subtracts.
local function release_saved(id, group, stage)
  local bytes = 0
  for pointer in string.gmatch(group['saved:' .. stage] or '', '%S+') do
    bytes = bytes + bytes_of(pointer)
    throw_away(pointer)
  end
  if bytes > 0 then call('HDEL', group_key(id), 'saved:' .. stage) end
  return bytes
end

local function remove_entry(stage, entry_id)
  local entries = removed.entries[stage] or {}
  entries[#entries + 1] = entry_id
  removed.entries[stage] = entries
end

-- Call `apply` with 1000 items at a time: Lua limits the number of arguments.
local function in_batches(items, apply)
  for i = 1, #items, 1000 do apply(unpack(items, i, math.min(i + 999, #items))) end
end

-- Store and remove what was collected, make its payloads garbage, and return the script's reply. Every script that accepts or
-- removes anything returns through this.
local function finish(reply)
  in_batches(stored, function(...) call('MSET', ...) end)
  for stage, entries in pairs(removed.entries) do
    local key = stream_key(stage)
    in_batches(entries, function(...) call('XACK', key, WORKERS, ...) end)
    in_batches(entries, function(...) call('XDEL', key, ...) end)
  end
  in_batches(removed.pointers, function(...) call('SADD', GARBAGE, ...) end)
  local bytes = 0
  for _, pointer in ipairs(removed.pointers) do bytes = bytes + bytes_of(pointer) end
  if bytes > 0 then call('HINCRBY', STATE, 'garbage_bytes', bytes) end
  in_batches(removed.groups, function(...) call('SREM', OPEN, ...) end)
  in_batches(removed.groups, function(...) call('HDEL', STARTED, ...) end)
  return reply
end

-- Close an open group: remove its payloads (except those of the pointer `spare`), entries and hash. Callers count it. `fate` is a
-- list of fields and values that say what became of it.
local function close(id, group, fate, spare)
  local record = { 'group', id, unpack(fate) }
  if group.trace then
    record[#record + 1] = 'trace'
    record[#record + 1] = group.trace
  end
  for name, value in pairs(group) do
    if string.sub(name, 1, 6) == 'facts:' then
      record[#record + 1] = name
      record[#record + 1] = value
    end
  end
  call('XADD', P .. 'fates', '*', unpack(record))
  for name, value in pairs(group) do
    if byte(name) == AT then
      if value ~= spare then throw_away(value) end
    elseif string.sub(name, 1, 6) == 'saved:' then
      for pointer in string.gmatch(value, '%S+') do throw_away(pointer) end
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

-- Close a group as dropped. With `retry`, its prompt waits to be published again, at most max_retries times; with `retry`
-- 'unscored' it waits for a repaired reward. `counter` is the field of the state that counts such drops in a row, or nil;
-- `detail` says what went wrong, or is nil.
local function drop(id, group, reason, stage, attempt, retry, max_retries, counter, detail)
  local pointer = group['@publish']
  local retries = tonumber(group.retries or 0)
  local unscored = retry == 'unscored' and pointer and call('HLEN', UNSCORED) < KEPT_UNSCORED
  local again = pointer and retries .. '|' .. pointer .. '|' .. (group['facts:publish'] or '')
  if unscored then call('HSET', UNSCORED, id, again) end
  retry = retry == true and pointer and retries < max_retries
  if retry then call('HSET', RETRIES, id, again) end
  local prompt = pointer and shared_key(pointer)
  local kept = ''
  if prompt and call('STRLEN', prompt) <= KEPT_BYTES then kept = call('GET', prompt) or '' end
  call('XADD', P .. 'dropped', 'MAXLEN', '~', KEPT_GROUPS, '*', 'group', id, 'reason', reason, 'stage', stage,
    'attempt', attempt, 'time', seconds(), 'retried', retry and 1 or 0, 'columns', kept,
    'detail', detail or '')
  local fate = { 'reason', reason, 'stage', stage, 'attempt', attempt, 'retried', retry and 1 or 0 }
  close(id, group, fate, (retry or unscored) and pointer or nil)
  call('HINCRBY', STATE, 'dropped', 1)
  if counter then call('HINCRBY', STATE, counter, 1) end
  call('HINCRBY', P .. 'drops', reason, 1)
end

-- Remove an unreadable entry and drop the group that it belongs to, if one is open.
local function discard(stage, entry_id)
  remove_entry(stage, entry_id)
  for _, id in ipairs(call('SMEMBERS', OPEN)) do
    if call('HGET', group_key(id), 'entry:' .. stage) == entry_id then
      drop(id, read_group(id), 'damaged', stage, 0, false, 0, FAILED)
    end
  end
end

-- Check that a delivery still holds its group: same entry, same consumer, not delivered again since.
local function held(id, stage, entry_id, consumer, attempt)
  local current_id, before = unpack(call('HMGET', group_key(id), 'entry:' .. stage, 'attempts:' .. stage))
  if current_id ~= entry_id then return false end
  local pending = call('XPENDING', stream_key(stage), WORKERS, entry_id, entry_id, 1)[1]
  if not pending then return false end
  local _, holder, _, deliveries = unpack(pending)
  return holder == consumer and deliveries + tonumber(before or 0) == tonumber(attempt)
end

-- Return whether a group was delivered too often, without those deliveries that saved much of their unfinished work: their
-- successors need less time, so that no group of long answers is poison because engines die now and then.
local function too_often(group, stage, attempt, max_deliveries)
  return attempt - tonumber(group['forgiven:' .. stage] or 0) >= max_deliveries
end

-- Put a held group at the end of its stage's queue again, or drop it as poison if it was delivered too often. `attempt` is
-- the delivery's number; unless `counts`, that delivery is forgotten.
local function hand_back(id, group, stage, attempt, counts, max_deliveries)
  if counts and too_often(group, stage, attempt, max_deliveries) then
    drop(id, group, 'poison', stage, attempt, false, 0, FAILED)
    return
  end
  if counts then call('HINCRBY', P .. 'redelivered', stage, 1) end
  remove_entry(stage, group['entry:' .. stage])
  local before = counts and attempt or attempt - 1
  local entry_id = offer(id, group, stage, before)
  call('HSET', group_key(id), 'entry:' .. stage, entry_id, 'attempts:' .. stage, before)
end

