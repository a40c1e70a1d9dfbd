"""What people and machines see of the server: spans, metrics, logs, tallies, feed, all derived from events.

Import the modules by name: re-exporting here would make the simulator, which replays a feed, pay for OpenTelemetry.
"""
