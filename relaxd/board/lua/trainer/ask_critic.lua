-- Ask the critic for a checkpoint of a step. ARGV: trainer's term, step, 1 if it is never to be removed.
local term, step, keep = tonumber(ARGV[1]), ARGV[2], ARGV[3] == '1'
local refusal = refuse_trainer(term)
if refusal then return refusal end
call('HSET', STATE, 'critic_checkpoint', step)
if keep then call('HSET', STATE, 'critic_kept', step) end
return 1
