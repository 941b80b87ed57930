-- Commit a step. ARGV: trainer's term, step, plan (JSON), metrics (JSON), number of samples to show, pointer of their attempt and
-- its payload of small columns (both empty without samples), then the groups' ids.
-- Returns 1; also if the same step was committed before. -1: the samples came too late, and nothing was committed.
local MAX_SAMPLES, MAX_SAMPLE_BYTES = 4096, 16777216

local term, step, plan, metrics = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3], ARGV[4]
local sample_count, pointer, shared, first_id = tonumber(ARGV[5]), ARGV[6], ARGV[7], 8
local group_count = #ARGV - first_id + 1

-- Add a step's samples to those that are shown, and throw the oldest away beyond the limits.
local function show_samples(step, count, pointer, bytes)
  local samples = P .. 'samples'
  call('XADD', samples, step .. '-0', 'count', count, 'pointer', pointer)
  local all = call('HINCRBY', STATE, 'samples', count)
  local all_bytes = call('HINCRBY', STATE, 'sample_bytes', bytes)
  while (all > MAX_SAMPLES or all_bytes > MAX_SAMPLE_BYTES) and call('XLEN', samples) > 1 do
    local entry = call('XRANGE', samples, '-', '+', 'COUNT', 1)[1]
    local oldest = to_table(entry[2])
    throw_away(oldest.pointer)
    call('XDEL', samples, entry[1])
    all = call('HINCRBY', STATE, 'samples', -oldest.count)
    all_bytes = call('HINCRBY', STATE, 'sample_bytes', -bytes_of(oldest.pointer))
  end
end

local refusal = refuse_trainer(term)
if refusal then return refusal end
local last_step = tonumber(call('HGET', STATE, 'last_step'))
if step ~= last_step + 1 then
  local entry = step == last_step and call('XRANGE', P .. 'ledger', step .. '-0', step .. '-0')[1]
  local committed = entry and to_table(entry[2])
  if committed and committed.term == ARGV[1] and committed.plan == plan then -- repeated: the reply was lost
    give_up({ pointer })
    return finish(1)
  end
  return fail('STEPCONFLICT step ' .. step .. ' cannot follow step ' .. last_step)
end
local groups, seen = {}, {}
for i = 1, group_count do
  local id = ARGV[first_id + i - 1]
  groups[i] = read_group(id)
  if not groups[i] then return fail('STEPCONFLICT group ' .. id .. ' of step ' .. step .. ' is not open') end
  if seen[id] then return fail('STEPCONFLICT group ' .. id .. ' is twice in the plan of step ' .. step) end
  seen[id] = true
end
if sample_count > 0 then
  if not accept(pointer, found_in(GARBAGE, { pointer })) then return finish(-1) end
  show_samples(step, sample_count, pointer, store(pointer, shared))
end
call('XADD', P .. 'ledger', step .. '-0', 'time', seconds(), 'term', ARGV[1], 'plan', plan, 'metrics', metrics)
for i = 1, group_count do close(ARGV[first_id + i - 1], groups[i], { 'step', step }) end
call('HINCRBY', STATE, 'trained', group_count)
call('HSET', STATE, 'last_step', step, FAILED, 0, FILTERED, 0)
return finish(1)
