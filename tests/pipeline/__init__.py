"""Orders of pipelines: named, printed, checked, timed and read from other libraries."""
