"""Programs besides the services themselves, whose modules `relaxd.roles` names."""

EXPORT_CHECKPOINT = "services.trainer.offline.export_checkpoint"
REPLAY = "services.trainer.offline.replay"
ALGORITHM_TRIAL = "relaxd.algorithms.algorithm_trial"
REWARD_TRIAL = "services.reward.trial"
ROLLOUT_TRIAL = "services.rollout.trial"
MANY_ROLLOUTS = "services.rollout.many"
SET_ANSWERS = "services.rollout.set_answers"
