-- Free what a finished run no longer needs: prompts that wait to be retried, attempts that are being written, sizes of groups,
-- names of publishes.
-- ARGV: coordinator's term.
local term = tonumber(ARGV[1])
local refused = refuse_coordinator(term)
if refused then return refused end
for _, waiting in ipairs({ RETRIES, UNSCORED }) do
  for _, retry in ipairs(call('HVALS', waiting)) do throw_away(string.match(retry, '|([^|]*)')) end
end
give_up(call('ZRANGE', PENDING, 0, -1))
call('DEL', RETRIES, UNSCORED, P .. 'sizes', P .. 'publishes')
return finish(1)
