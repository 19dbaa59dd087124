"""What users get wrong, and what they are told."""
