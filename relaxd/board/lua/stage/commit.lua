-- Commit the columns of many groups. ARGV: stages (JSON), then for each group: id, stage, entry, pointer, oldest weight version
-- (or empty), payload of the small columns, "<enqueued_at> <started_at> <ended>" (or empty), facts (JSON, or empty).
-- Returns for each 1 (committed), 0 (another attempt was first, or the group is closed) or -1 (its payloads expired and must be
-- written again).
local stages = cjson.decode(ARGV[1])
local results = {}
for i = 2, #ARGV, 8 do
  local id, stage, _, pointer, version, shared, times, facts = unpack(ARGV, i, i + 7)
  local group = read_group(id)
  local result = 0
  if group and group['@' .. stage] == pointer then
    result = keep(pointer, shared) and 1 or -1 -- repeated: the reply was lost
  elseif group and group['entry:' .. stage] and not group['@' .. stage] then
    local bytes = keep(pointer, shared)
    if bytes then
      result = 1
      account(id, group, bytes - release_saved(id, group, stage))
      remove_entry(stage, group['entry:' .. stage])
      group['@' .. stage] = pointer
      local changes = { '@' .. stage, pointer }
      if times ~= '' then
        changes[3], changes[4] = 'time:' .. stage, times
      end
      if facts ~= '' then
        changes[#changes + 1] = 'facts:' .. stage
        changes[#changes + 1] = facts
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
