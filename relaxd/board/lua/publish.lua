-- Publish groups, all or none: gate, data cursor, counters, entries.
-- ARGV: epoch, stages (JSON), cursor (JSON, or empty: leave it), then for each group: id, pointer, trace, bytes, retry_of,
-- the payload of its small columns.
-- With epoch = -1 nothing is published: the answer is how many groups the gate has room for.
local epoch = tonumber(ARGV[1])
local state = call('HMGET', STATE, 'coordinator_epoch', 'gate_open', 'oldest_version', 'published', 'dropped', 'last_publish',
  'groups_per_step', 'steps', 'max_staleness', 'oversample', 'high_water_bytes', 'expected_bytes')
if not state[1] then return fail('RUNMISSING the run is not on the board') end
local asking = epoch < 0
if not asking then
  if epoch < tonumber(state[1]) then return fail('FENCED epoch ' .. epoch .. ' is over: ' .. state[1] .. ' coordinates') end
  call('HSET', STATE, 'coordinator_epoch', epoch)
end

local ids, bytes = {}, 0
for i = 4, #ARGV, 6 do
  ids[#ids + 1] = ARGV[i]
  bytes = bytes + tonumber(ARGV[i + 3])
end
if not asking and table.concat(ids, ' ') == state[6] then return 0 end -- said again: the reply was lost

-- The gate (design: published - dropped < (oldest version + 1 + max_staleness) x groups_per_step x oversample).
local counted = tonumber(state[4]) - tonumber(state[5])
local needed = tonumber(state[8]) * tonumber(state[7])
local limit, reason = 0, nil
if state[2] ~= '1' then
  reason = 'closed by the coordinator'
elseif state[3] == '' then
  reason = 'staleness no engine has weights yet'
else
  limit = math.ceil((tonumber(state[3]) + 1 + tonumber(state[9])) * tonumber(state[7]) * tonumber(state[10]))
  reason = 'staleness ' .. counted .. ' of ' .. limit .. ' groups that weights of version ' .. state[3] .. ' allow'
  if limit >= needed then
    limit = needed
    reason = 'complete ' .. counted .. ' of ' .. needed .. ' groups that the run needs'
  end
  local used = tonumber(string.match(call('INFO', 'memory'), 'used_memory:(%d+)'))
  local high_water, expected = tonumber(state[11]), tonumber(state[12])
  if used >= high_water or expected + bytes > high_water then
    limit = 0
    reason = 'memory ' .. used .. ' bytes used, ' .. expected .. ' expected, ' .. bytes .. ' more, limit ' .. high_water
  end
end
if asking then return math.max(0, limit - counted) end
if counted + #ids > limit then return fail('GATE ' .. reason) end

for i = 1, #ids, 1000 do
  for n, open in ipairs(call('SMISMEMBER', OPEN, unpack(ids, i, math.min(i + 999, #ids)))) do
    if open == 1 then return fail('CONFLICT group ' .. ids[i + n - 1] .. ' is open already') end
  end
end
for i = 4, #ARGV, 6 do
  local retry_of = ARGV[i + 4]
  if retry_of ~= '' then
    if call('HEXISTS', RETRIES, retry_of) == 0 then return fail('CONFLICT no retry of group ' .. retry_of .. ' is waiting') end
  elseif not keep(ARGV[i + 1], ARGV[i + 5]) then
    return fail('EXPIRED')
  end
end

local stages = cjson.decode(ARGV[2])
local time = call('TIME')
local now = time[1] .. string.format('%06d', time[2])
for i = 4, #ARGV, 6 do
  local id, pointer, retries, retry_of = ARGV[i], ARGV[i + 1], 0, ARGV[i + 4]
  if retry_of ~= '' then
    local before
    before, pointer = string.match(call('HGET', RETRIES, retry_of), '^(%d+)|(.*)$')
    retries = tonumber(before) + 1
    call('HDEL', RETRIES, retry_of)
  end
  local group = { ['@publish'] = pointer, trace = ARGV[i + 2] }
  local changes = { '@publish', pointer, 'trace', ARGV[i + 2], 'published', now, 'bytes', ARGV[i + 3] }
  if retries > 0 then
    changes[9], changes[10] = 'retries', retries
  end
  offer_ready(id, group, stages, changes)
  call('HSET', group_key(id), unpack(changes))
end
in_batches(ids, function(...) call('SADD', OPEN, ...) end)
call('HSET', STATE, 'last_publish', table.concat(ids, ' '))
call('HINCRBY', STATE, 'published', #ids)
call('HINCRBY', STATE, 'expected_bytes', bytes)
if ARGV[3] ~= '' then call('HSET', STATE, 'cursor', ARGV[3]) end
return #ids
