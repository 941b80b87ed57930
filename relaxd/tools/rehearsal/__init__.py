"""Rehearsals of a run at its real size, without its GPUs (docs/rehearse.md).

`assumptions` makes the configuration that is rehearsed, `rehearse` runs it, `counters` measures it, `capacity` and
`rehearsal_report` assess the measurements.
"""
