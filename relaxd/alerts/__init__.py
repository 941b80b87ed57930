"""Alerts: rules on a run's metrics, which raise alarms, and notifications of alarms and ends.

Only the standard library, and Apprise where something is sent: the trackers' process uses it, too.
"""
