"""The command line: ``fshard ckpt ls|show|verify|convert|diff``."""
