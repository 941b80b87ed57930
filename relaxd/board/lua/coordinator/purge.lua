-- Free what a finished run no longer needs: prompts that wait to be retried, sizes of groups. ARGV: coordinator's term.
local term = tonumber(ARGV[1])
local refused = refuse_coordinator(term)
if refused then return refused end
for _, waiting in ipairs({ RETRIES, UNSCORED }) do
  for _, retry in ipairs(call('HVALS', waiting)) do
    local pointer = string.match(retry, '|([^|]*)')
    for _, key in ipairs(payload_keys(pointer)) do removed.payloads[#removed.payloads + 1] = key end
  end
end
call('DEL', RETRIES, UNSCORED, P .. 'sizes')
return finish(1)
