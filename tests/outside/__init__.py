"""Models from outside, trained in several ways and compared with one plain process."""
