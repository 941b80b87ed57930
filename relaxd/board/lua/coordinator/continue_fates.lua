-- Let fates to come have entries above the last one that the run's folder has, whatever the clock of this Redis says.
-- ARGV: coordinator's term, that entry.
local term, last = tonumber(ARGV[1]), ARGV[2]
local refused = refuse_coordinator(term)
if refused then return refused end
local reply = redis.pcall('XADD', P .. 'fates', last, 'group', '')
if type(reply) == 'string' then
  call('XDEL', P .. 'fates', last)
elseif not string.find(reply.err, 'equal or smaller', 1, true) then -- else there have been entries above it
  return reply
end
return 1
