"""The project as a whole: layering, public names, docs, examples and benchmarks."""
