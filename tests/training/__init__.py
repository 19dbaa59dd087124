"""Whole train and eval steps against one plain process."""
