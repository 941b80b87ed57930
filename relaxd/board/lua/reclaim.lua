-- Free what a consumer that is gone holds, and forget the consumer. ARGV: coordinator's term, consumer, max_deliveries, then the stages. The
-- delivery counts. Answers how many groups that were.
local term = tonumber(ARGV[1])
local current = call('HGET', STATE, 'coordinator_term')
if not current then return fail('RUNMISSING the run is not on the board') end
if term < tonumber(current) then return fail('FENCED term ' .. term .. ' is over: ' .. current .. ' coordinates') end
local freed = 0
for i = 4, #ARGV do
  local stage = ARGV[i]
  for _, pending in ipairs(call('XPENDING', stream_key(stage), WORKERS, '-', '+', 100000, ARGV[2])) do
    local entry = call('XRANGE', stream_key(stage), pending[1], pending[1])[1]
    if entry then
      local fields = {}
      for j = 1, #entry[2], 2 do fields[entry[2][j]] = entry[2][j + 1] end
      local group = read_group(fields.group)
      if group then -- else it was dropped a moment ago, in another stage
        hand_back(fields.group, group, stage, tonumber(fields.attempts or 0) + pending[4], true, tonumber(ARGV[3]))
        freed = freed + 1
      end
    end
  end
end
finish()
for i = 4, #ARGV do
  local stream = stream_key(ARGV[i])
  if #call('XPENDING', stream, WORKERS, '-', '+', 1, ARGV[2]) == 0 then call('XGROUP', 'DELCONSUMER', stream, WORKERS, ARGV[2]) end
end
return freed
