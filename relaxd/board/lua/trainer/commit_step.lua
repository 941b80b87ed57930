-- Commit a step. ARGV: trainer's term, step, plan (JSON), metrics (JSON), number of groups, their ids, then samples (JSON each).
-- Returns the number of groups; 0 if the same step was committed before.
local MAX_SAMPLES, MAX_SAMPLE_BYTES = 4096, 16777216

local term, step, plan, metrics, group_count = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3], ARGV[4], tonumber(ARGV[5])
local first_id, first_sample = 6, 6 + group_count
local refusal = refuse_trainer(term)
if refusal then return refusal end
local last_step = tonumber(call('HGET', STATE, 'last_step'))
if step ~= last_step + 1 then
  local entry = step == last_step and call('XRANGE', P .. 'ledger', step .. '-0', step .. '-0')[1]
  local committed = entry and to_table(entry[2])
  if committed and committed.term == ARGV[1] and committed.plan == plan then return 0 end -- repeated: the reply was lost
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
call('XADD', P .. 'ledger', step .. '-0', 'time', seconds(), 'term', ARGV[1], 'plan', plan, 'metrics', metrics)
for i = 1, group_count do close(ARGV[first_id + i - 1], groups[i], { 'step', step }) end
local samples = P .. 'samples'
for i = first_sample, #ARGV do
  call('XADD', samples, 'MAXLEN', '~', MAX_SAMPLES, step .. '-' .. (i - first_sample), 'sample', ARGV[i])
end
if #ARGV >= first_sample then -- long texts: keep fewer
  while call('MEMORY', 'USAGE', samples) > MAX_SAMPLE_BYTES and call('XLEN', samples) > 1 do
    call('XTRIM', samples, 'MAXLEN', math.floor(call('XLEN', samples) / 2))
  end
end
call('HINCRBY', STATE, 'trained', group_count)
call('HSET', STATE, 'last_step', step, FAILED, 0, FILTERED, 0)
return finish(group_count)
