-- Start the next critic term. Returns it.
if call('EXISTS', STATE) == 0 then return run_missing() end
return call('HINCRBY', STATE, 'critic_term', 1)
