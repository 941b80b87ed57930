-- Commit a step. ARGV: term, step, plan (JSON), metrics (JSON), number of groups, their ids, then samples (JSON each).
local KEPT_SAMPLES, KEPT_SAMPLE_BYTES = 4096, 16777216

local term, step, count = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[5])
local state = call('HMGET', STATE, 'trainer_term', 'last_step')
if not state[1] then return fail('RUNMISSING the run is not on the board') end
if term ~= tonumber(state[1]) then return fail('FENCED trainer term ' .. term .. ' is over: ' .. state[1] .. ' trains') end
local last = tonumber(state[2])
if step ~= last + 1 then
  local entry = step == last and call('XRANGE', P .. 'ledger', step .. '-0', step .. '-0')[1]
  if entry and entry[2][4] == ARGV[1] and entry[2][6] == ARGV[3] then return 0 end -- said again: the reply was lost
  return fail('STEPCONFLICT step ' .. step .. ' cannot follow step ' .. last)
end
local groups, seen = {}, {}
for i = 1, count do
  local id = ARGV[5 + i]
  groups[i] = read_group(id)
  if not groups[i] then return fail('STEPCONFLICT group ' .. id .. ' of step ' .. step .. ' is not open') end
  if seen[id] then return fail('STEPCONFLICT group ' .. id .. ' is twice in the plan of step ' .. step) end
  seen[id] = true
end
local time = call('TIME')
call('XADD', P .. 'ledger', step .. '-0', 'time', time[1] .. '.' .. string.format('%06d', time[2]), 'term', ARGV[1],
  'plan', ARGV[3], 'metrics', ARGV[4])
for i = 1, count do close(ARGV[5 + i], groups[i]) end
local samples = P .. 'samples'
for i = 6 + count, #ARGV do
  call('XADD', samples, 'MAXLEN', '~', KEPT_SAMPLES, step .. '-' .. (i - 6 - count), 'sample', ARGV[i])
end
if #ARGV > 5 + count then -- long texts: keep fewer
  while call('MEMORY', 'USAGE', samples) > KEPT_SAMPLE_BYTES and call('XLEN', samples) > 1 do
    call('XTRIM', samples, 'MAXLEN', math.floor(call('XLEN', samples) / 2))
  end
end
call('HINCRBY', STATE, 'trained', count)
call('HSET', STATE, 'last_step', step, FAILED, 0, FILTERED, 0)
return finish(count)
