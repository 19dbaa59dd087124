"""What a run will take, before anything runs: ``fshard plan``, and the tables and pages that it prints."""
