"""Forecasts of runs, before anything runs: ``fshard plan``, and the tables and pages that it prints."""
