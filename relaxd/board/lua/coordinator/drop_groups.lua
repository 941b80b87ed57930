-- Drop open groups, whoever holds them. ARGV: coordinator's term, reason, retry (0 or 1), max_retries, counter of such drops in a
-- row (or empty), ids. Returns the number of dropped groups: those that were open.
local term, reason, retry, max_retries, counter = tonumber(ARGV[1]), ARGV[2], ARGV[3] == '1', tonumber(ARGV[4]), ARGV[5]
local refused = refuse_coordinator(term)
if refused then return refused end
local dropped = 0
for i = 6, #ARGV do
  local group = read_group(ARGV[i])
  if group then
    drop(ARGV[i], group, reason, '', 0, retry, max_retries, counter ~= '' and counter or nil)
    dropped = dropped + 1
  end
end
return finish(dropped)
