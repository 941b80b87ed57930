"""The teacher as an SGLang engine: a frozen model that prefills answers and gives the log-probs of their tokens.

Runs have it with roles.teacher.engine = "sglang"; `services.trainer.teacher` is the teacher in ranks of Megatron. Both
write the same columns.
"""
