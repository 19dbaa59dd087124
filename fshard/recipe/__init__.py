"""Training from a file: ``fs.train`` and ``fshard train``. A config becomes a script, and the script is what runs."""
