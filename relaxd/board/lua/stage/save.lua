-- Save one more part of the unfinished work of a delivery or, without a pointer, forget the parts that are saved.
-- ARGV: id, stage, entry, consumer, attempt, pointers of the parts that the caller knows to be saved, pointer of the new
-- part (or empty), its payload of the small columns, whether the delivery is forgiven for it (0 or 1).
-- Returns 0 if the delivery does not hold the group any more, or others have saved or forgotten something; -1 if the part came
-- too late, and must be written again under another name.
local id, stage, entry_id, consumer, attempt, before, pointer, shared, forgiven = unpack(ARGV)
local field, group = 'saved:' .. stage, read_group(id)
local after = pointer == '' and '' or before == '' and pointer or before .. ' ' .. pointer
local current = group and group[field] or ''
if group and current == after then return 1 end -- repeated: the reply was lost
if not group or current ~= before or not held(id, stage, entry_id, consumer, attempt) then
  if pointer ~= '' then give_up({ pointer }) end
  return finish(0)
end
if pointer == '' then
  add_stored(id, -release_saved(id, group, stage))
  return finish(1)
end
if not accept(pointer, found_in(GARBAGE, { pointer })) then return finish(-1) end
add_stored(id, store(pointer, shared))
call('HSET', group_key(id), field, after)
if forgiven == '1' and group['forgiven_attempt:' .. stage] ~= attempt then
  call('HSET', group_key(id), 'forgiven_attempt:' .. stage, attempt)
  call('HINCRBY', group_key(id), 'forgiven:' .. stage, 1)
end
return finish(1)
