-- Note that the trainer sends weights with this digest as this version. ARGV: coordinator's term, version, digest.
local term, version, digest = tonumber(ARGV[1]), ARGV[2], ARGV[3]
local refused = refuse_coordinator(term)
if refused then return refused end
local key = P .. 'weights'
local digests = call('HGET', key, version)
if digests and string.find(' ' .. digests .. ' ', ' ' .. digest .. ' ', 1, true) then return 0 end
call('HSET', key, version, digests and digests .. ' ' .. digest or digest)
return 1
