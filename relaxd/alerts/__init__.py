"""Alerts: rules on a run's metrics, which raise alarms, and notifications of alarms and ends.

The trackers' process uses this package, too, so it needs only the standard library, and Apprise for sending.
"""
