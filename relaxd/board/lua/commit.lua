-- Commit columns of many groups. ARGV: stages (JSON), then for each: id, stage, entry, pointer, version (or empty), the
-- payload of its small columns, when the work was enqueued, started and ended (or empty).
-- Answers for each 1 (committed), 0 (another was first, or the group is closed) or -1 (its payloads expired: write them again).
local stages = cjson.decode(ARGV[1])
local results = {}
for i = 2, #ARGV, 7 do
  local id, stage, entry_id, pointer, version = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4]
  local shared, times = ARGV[i + 5], ARGV[i + 6]
  local group = read_group(id)
  local result = 0
  if group and group['@' .. stage] == pointer then
    result = keep(pointer, shared) and 1 or -1 -- said again: the reply was lost
  elseif group and group['entry:' .. stage] and not group['@' .. stage] then
    local bytes = keep(pointer, shared)
    if bytes then
      result = 1
      account(id, group, bytes)
      remove_entry(stage, group['entry:' .. stage])
      group['@' .. stage] = pointer
      local changes = { '@' .. stage, pointer }
      if times ~= '' then
        changes[3], changes[4] = 'time:' .. stage, times
      end
      offer_ready(id, group, stages, changes)
      call('HSET', group_key(id), unpack(changes))
      if version ~= '' then call('HSET', STARTED, id, version) end
    else
      result = -1
    end
  else
    in_batches(payload_keys(pointer), function(...) call('UNLINK', ...) end)
  end
  results[#results + 1] = result
end
return finish(results)
