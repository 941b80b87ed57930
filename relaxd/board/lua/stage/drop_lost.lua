-- Drop open groups that lack a payload; their prompts wait to be retried. ARGV: max_retries, then for each: id, a key that was not
-- found, which this script believes if it is on a data node. Returns their number.
local max_retries = tonumber(ARGV[1])
local dropped = 0
for i = 2, #ARGV, 2 do
  local id, missing = ARGV[i], ARGV[i + 1]
  local group = read_group(id)
  for name, value in pairs(group or {}) do
    if byte(name) == AT then
      local keys, shared = slice_keys(value), shared_key(value)
      keys[#keys + 1] = shared
      local there = 0
      in_batches(keys, function(...) there = there + call('EXISTS', ...) end)
      local on_node = string.find(value, '@', 1, true) and string.sub(missing, 1, #shared + 1) == shared .. ':'
      if there < #keys or on_node then
        drop(id, group, 'payload_lost', '', 0, true, max_retries, FAILED)
        dropped = dropped + 1
        break
      end
    end
  end
end
return finish(dropped)
