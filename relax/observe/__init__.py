"""The observing side: records, metrics, progress and the report. It looks at a run and never steers it."""
