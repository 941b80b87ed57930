-- The admission gate. Groups may be published while
--
--   published - dropped < (oldest version + 1 + max_staleness) x groups_per_step x oversample
--
-- and Redis has room. An open group counts with the bytes it has stored and, until its first stage commits, the room reserved for
-- the rest: up to the worst case until a quarter of a step's groups have closed, then to the 90th percentile of closed groups.
-- What closed groups have stored counts until the sweep has freed it.
-- Groups that the open step still lacks pass as long as Redis accepts writes: without them no step would close and make room.
-- With data nodes, groups take their room there, and must leave some on this Redis.

-- Return the bytes that Redis uses, may use, and that open groups may take. Without a maxmemory, Redis may use a quarter of
-- its machine's memory, or more if the configured high-water mark needs it.
local function memory(high_water)
  local info = call('INFO', 'memory')
  local used = tonumber(string.match(info, 'used_memory:(%d+)'))
  local max_bytes = tonumber(string.match(info, 'maxmemory:(%d+)'))
  if max_bytes == 0 then max_bytes = math.max(tonumber(string.match(info, 'total_system_memory:(%d+)')) / 4, high_water * 1.25) end
  if high_water == 0 then high_water = max_bytes * 0.8 end
  return used, math.floor(max_bytes), math.floor(high_water)
end

-- Return the 90th percentile of the bytes of closed groups; nil while too few have closed.
local function learned_size(groups_per_step)
  local sizes = call('LRANGE', P .. 'sizes', 0, -1)
  if #sizes < math.ceil(groups_per_step / 4) then return nil end
  for i = 1, #sizes do sizes[i] = tonumber(sizes[i]) end
  table.sort(sizes)
  return sizes[math.ceil(#sizes * 0.9)]
end

-- What data nodes use, may use, and may use for surplus groups: `room`, `publish` and `relieve` get it as their first arguments.
local NODES = { used = tonumber(ARGV[1]), max_bytes = tonumber(ARGV[2]), high_water = tonumber(ARGV[3]) }
local HAS_NODES = (NODES.max_bytes or 0) > 0

-- Return what is full ('', or numbers for the reply), the most bytes of it, and the bytes that open groups may take.
local function fullness(configured)
  local used, max_bytes, high_water = memory(HAS_NODES and 0 or configured)
  local full = used >= max_bytes and used .. ' ' .. max_bytes or ''
  if not HAS_NODES then return full, max_bytes, high_water end
  local groups_may_take = configured > 0 and math.min(configured, NODES.high_water) or NODES.high_water
  if used >= high_water then groups_may_take = 0 end
  if full == '' and NODES.used >= NODES.max_bytes then full = NODES.used .. ' ' .. NODES.max_bytes .. ' 1' end
  return full, NODES.max_bytes, groups_may_take
end

local function admission()
  local names = { 'gate_open', 'oldest_version', 'published', 'dropped', 'last_step', 'groups_per_step', 'steps', 'max_staleness',
    'oversample', 'high_water_bytes', 'stored_bytes', 'reserved_bytes',
    'garbage_bytes' }
  local values = call('HMGET', STATE, unpack(names))
  local state = {}
  for i, name in ipairs(names) do state[name] = tonumber(values[i]) end
  local counted, per_step = state.published - state.dropped, state.groups_per_step
  local stored = state.stored_bytes + state.garbage_bytes
  local full, _, high_water = fullness(state.high_water_bytes)
  local learned = learned_size(per_step)
  local gate = {
    counted = counted,
    lacking = math.max(0, (state.last_step + 1) * per_step - counted),
    taken = stored + state.reserved_bytes,
  }
  function gate.room_for(worst) return learned and math.min(learned, worst) or worst end
  -- Return how many groups of this worst case may be published, and what limits them: a word, then numbers.
  function gate.admit(worst)
    if state.gate_open ~= 1 then return 0, 'closed' end
    if not state.oldest_version then return 0, 'weights' end
    local needed = state.steps * per_step
    local limit = math.ceil((state.oldest_version + 1 + state.max_staleness) * per_step * state.oversample)
    local allowed, reason = limit - counted, 'staleness ' .. limit .. ' ' .. state.oldest_version
    if limit >= needed then allowed, reason = needed - counted, 'complete ' .. needed end
    if allowed <= 0 then return 0, reason end
    if full ~= '' then return 0, 'full ' .. full end
    local each = gate.room_for(worst)
    local by_memory = math.max(gate.lacking, math.floor((high_water - gate.taken) / math.max(each, 1)))
    if by_memory < allowed then
      allowed, reason = by_memory, 'memory ' .. stored .. ' ' .. state.reserved_bytes .. ' ' .. each .. ' ' .. high_water
    end
    return allowed, reason
  end
  return gate
end

