-- Commit the columns of many groups. ARGV: stages (JSON), then for each group: id, stage, pointer, payload of the small columns,
-- oldest weight version (or empty), "<enqueued_at> <started_at> <ended>" (or empty), facts (JSON, or empty).
-- Returns for each 1 (committed), 0 (another attempt was first, or the group is closed) or -1 (it came too late, and must be
-- written again under another name).
local stages = cjson.decode(ARGV[1])
local results, pointers, stored_bytes, reserved_bytes = {}, {}, 0, 0
for i = 4, #ARGV, 7 do pointers[#pointers + 1] = ARGV[i] end
local garbage = found_in(GARBAGE, pointers)
for i = 2, #ARGV, 7 do
  local id, stage, pointer, shared, version, times, facts = unpack(ARGV, i, i + 6)
  local group = read_group(id)
  local result = 0
  if group and group['@' .. stage] == pointer then
    result = 1 -- repeated: the reply was lost
  elseif group and group['entry:' .. stage] and not group['@' .. stage] then
    if accept(pointer, garbage) then
      result = 1
      remove_entry(stage, group['entry:' .. stage])
      group['@' .. stage] = pointer
      local bytes = store(pointer, shared) - release_saved(id, group, stage)
      local changes = { '@' .. stage, pointer, 'stored', group.stored + bytes }
      stored_bytes = stored_bytes + bytes
      -- The first stage that commits writes nearly all that a group ever stores: the room that was reserved for it is free.
      if group.room ~= '0' then
        reserved_bytes = reserved_bytes - group.room
        changes[5], changes[6] = 'room', 0
      end
      if times ~= '' then
        changes[#changes + 1] = 'time:' .. stage
        changes[#changes + 1] = times
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
    give_up({ pointer })
  end
  results[#results + 1] = result
end
if stored_bytes ~= 0 then call('HINCRBY', STATE, 'stored_bytes', stored_bytes) end
if reserved_bytes ~= 0 then call('HINCRBY', STATE, 'reserved_bytes', reserved_bytes) end
return finish(results)
