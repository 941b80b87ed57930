"""Alerts: rules on a run's numbers, which make alarms, and notifications, which tell people of alarms and ends.

Only the standard library, and Apprise where something is sent: the trackers' process uses it, too.
"""
