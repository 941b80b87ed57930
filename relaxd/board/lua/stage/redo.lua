-- Have another stage do its work on held groups again: its columns are thrown away, and the groups leave this stage until it has
-- committed new ones. ARGV: stage, consumer, the other stage, then for each delivery: id, entry, attempt. Returns the number of
-- groups that were still held.
local stage, consumer, again = ARGV[1], ARGV[2], ARGV[3]
local redone = 0
for i = 4, #ARGV, 3 do
  local id, entry_id, attempt = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  if held(id, stage, entry_id, consumer, attempt) then
    local group = read_group(id)
    local pointer = group['@' .. again]
    remove_entry(stage, entry_id)
    throw_away(pointer)
    add_stored(id, -bytes_of(pointer))
    call('HDEL', group_key(id), '@' .. again, 'time:' .. again, 'facts:' .. again, 'entry:' .. stage, 'attempts:' .. stage)
    group['@' .. again] = nil
    call('HSET', group_key(id), 'entry:' .. again, offer(id, group, again, 0), 'attempts:' .. again, 0)
    redone = redone + 1
  end
end
return finish(redone)
