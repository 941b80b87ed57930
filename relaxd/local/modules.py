"""The services' modules, for starting them as processes. Nothing else in the library names them."""

SERVICES = {
    "coordinator": "services.coordinator",
    "trainer": "services.trainer",
    "rollout": "services.rollout",
    "reward": "services.reward",
    "advantage": "services.advantage",
}
"""Module by role, in the order in which `relaxd up` starts them."""
REPLICA_ROLES = tuple(role for role in SERVICES if role != "coordinator")
"""Roles whose processes register with the coordinator."""
SCALABLE_ROLES = ("rollout", "reward", "advantage")
"""Roles that may have any number of replicas."""
EXPORT_CHECKPOINT = "services.trainer.offline.export_checkpoint"
REPLAY = "services.trainer.offline.replay"
REWARD_TRIAL = "services.reward.trial"
