-- Drop open groups that lack a payload; their prompts wait to be retried. ARGV: max_retries, ids. Returns their number.
local max_retries = tonumber(ARGV[1])
local dropped = 0
for i = 2, #ARGV do
  local id = ARGV[i]
  local group = read_group(id)
  for name, value in pairs(group or {}) do
    if byte(name) == AT then
      local keys = slice_keys(value)
      keys[#keys + 1] = shared_key(value)
      local there = 0
      in_batches(keys, function(...) there = there + call('EXISTS', ...) end)
      if there < #keys then
        drop(id, group, 'payload_lost', '', 0, true, max_retries, FAILED)
        dropped = dropped + 1
        break
      end
    end
  end
end
return finish(dropped)
