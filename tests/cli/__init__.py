"""The fshard command."""
