"""Unit graphs: each distinct unit is traced once, and its calls run the graph instead of the unit's Python."""
